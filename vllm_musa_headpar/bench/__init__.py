"""What the exchange costs: times against the stock host and the bare collective, and counts of what is done.

Times are of the machine they are taken on; counts are the same everywhere.
"""
