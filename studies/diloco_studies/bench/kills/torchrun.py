"""torchrun itself, without one thing that costs it time: a machine's agent is forked as this.

In each step of a rendezvous it asks for its own method's name, for a log of events that nobody reads here. That walks
the stack through all loaded modules, which takes up to 0.1 s of a core where so many are loaded.
"""

from torch.distributed import run
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

if __name__ == "__main__":
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    run.main()
