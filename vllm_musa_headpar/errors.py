"""Errors that an exchange raises beside ValueError and TypeError for wrong local input."""


class ExchangeError(RuntimeError):
    """An exchange failed on its way. The message names the exchange; the cause is chained."""


class DisagreementError(ExchangeError):
    """Ranks brought different exchanges, or one did not arrive. The message names the ranks and the field."""
