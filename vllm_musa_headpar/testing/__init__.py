"""Tools for proving the exchange where no MUSA card is at hand. Product code imports none of this.

`counters`  what a piece of code costs: collectives, launches, bytes, host syncs, on any backend
`musa`      a simulated MUSA device: device type "musa" in pure Python over CPU memory
`mccl`      a simulated MCCL process group over Gloo, with MCCL's rules enforced
`ranks`     run one function as several ranks, each in a process of its own
"""
