"""Several processes that train one run together: how they meet, what they agree on, and that one of them writes."""
import contextlib
import os

import numpy as np

from posjax.errors import UserError
from posjax.io.run_dir import RunDir


def join(coordinator=None, num_processes=None, process_id=None):
    """Meets the other processes (`jax.distributed`), if there are any; must come before jax starts.

    There are where all three arguments say so, where Slurm or Open MPI started more than one task (jax finds the others then),
    or where JAX_COORDINATOR_ADDRESS is set and jax can tell the rest.

    Args:
      coordinator: HOST:PORT of the first process, which the others can reach.
      num_processes: how many there are.
      process_id: which of them this is, from 0.

    Raises:
      ValueError: one of the arguments without the others, or a number that cannot be.
    """
    import jax

    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if not missing:
        if num_processes < 1 or not 0 <= process_id < num_processes:
            raise UserError(f"--process_id is {process_id} and --num_processes is {num_processes}; processes are numbered "
                            "from 0.")
        try:
            jax.distributed.initialize(coordinator, num_processes, process_id)
        except ValueError as error:
            raise UserError(f"--coordinator={coordinator}: {error}") from error
    elif len(missing) < len(given):
        raise UserError(f"{', '.join(missing)} is missing: --coordinator, --num_processes and --process_id go together.")
    elif num_tasks() > 1 or os.environ.get("JAX_COORDINATOR_ADDRESS"):
        jax.distributed.initialize()


def num_tasks():
    """How many tasks Slurm (within srun) or Open MPI started this one among; 1 elsewhere."""
    if "SLURM_STEP_NODELIST" in os.environ and "SLURM_PROCID" in os.environ:
        return int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", 1)))
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))


def is_first():
    """Whether this process writes for all."""
    import jax
    return jax.process_index() == 0


def largest(number):
    """The largest of the processes' numbers (int32), on all of them; every process must ask."""
    import jax
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils
    return int(multihost_utils.process_allgather(np.int32(number)).max())


def fetch(tree):
    """The arrays of a tree as numpy's, wherever their devices are; every process must ask."""
    import jax
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    from jax.experimental import multihost_utils
    return multihost_utils.process_allgather(tree, tiled=True)


def _nothing(*args, **kwargs):
    """Writes nothing."""


class Reader(RunDir):
    """The run directory of a process that is not the first: it reads what is there, and leaves all writing to the first."""
    write_environment = append_metrics = append_evals = truncate_after = finish = fail = _nothing


class Silent:
    """What such a process has in place of something that only writes."""

    def __getattr__(self, name):
        return _nothing


@contextlib.contextmanager
def open_run(path, config, **options):
    """`RunDir.create` by the first process; the others read the same directory, and write nothing.

    Raises:
      ValueError: in every process, where the first cannot open the run.
    """
    run, failure = None, None
    if is_first():
        try:
            run = RunDir.create(path, config, **options)
        except UserError as error:
            failure = error
    if largest(int(failure is not None)):
        raise failure or UserError(f"The first process cannot open the run {path}.")
    if run is None:
        yield Reader.open(path)
        return
    with run:
        yield run
