"""The host's process with the simulated engine: `-m tests.bench.simulated_host`."""

from services.bench.reblock.host import main
from tests.bench.reblock_builders import an_engine

if __name__ == "__main__":
    main(lambda args: an_engine(max_num_seqs=args.max_num_seqs))
