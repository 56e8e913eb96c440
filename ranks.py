"""Ranks of one job: they join, they agree, and when one fails all end and what happened first is what one reads last.

join_ranks(timedelta(minutes=30))          # init_process_group, also after torchrun's restarts
dump_stacks(run_dir, rank)                 # from now on a crash or a stop leaves this rank's stack in stacks/
os._exit(report_failure(error))            # the sentence and the exit code of what ended this rank
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from errors import UserError

stacks_path: Path | None = None  # the file this rank's stack goes to; set by dump_stacks, for report_failure


# ---------------------------------------------------------------------------------------------------------------------
# Join and agree


def die_with_launcher() -> None:
    """Have the kernel kill this rank when torchrun dies. torchrun starts ranks in sessions of their own, so a `kill -9` of it
    would leave them training unseen, with the GPUs in their hands and two writers in the run folder after the restart.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def join_ranks(timeout: timedelta) -> None:
    """`init_process_group`, also after a restart; plain `python train_grpo.py` is a job of one rank. Collective.

    torch 2.13's agent keeps one store for all restarts, and in it the addresses of processes that are dead ("Connection
    refused"), so each attempt gets a name space of its own. Nodes count restarts apart: with several of them, start torchrun
    under TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which makes a new store each time.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= alone | dict(os.environ)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def check_ranks_agree(view: dict[str, Any]) -> None:
    """Raises UserError when ranks hold different views of the job: a folder or a file that is not the same on all nodes
    would end in a hang or, worse, in a policy trained on two things. Warns of clocks that differ. Collective.
    """
    dist.barrier()
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, view | {"host": socket.gethostname(), "clock": time.time()})
    first = views[0]
    for rank, other in enumerate(views):
        for name in [name for name in view if other[name] != first[name]]:
            raise UserError(
                f"{name}: {first[name]} on rank 0 ({first['host']}), but {other[name]} on rank {rank} ({other['host']}); start all "
                f"nodes with the same flags, and keep model, data and --runs-dir where all nodes see the same files."
            )
    ahead, behind = max(views, key=lambda v: v["clock"]), min(views, key=lambda v: v["clock"])
    apart = ahead["clock"] - behind["clock"]
    if apart > 5 and dist.get_rank() == 0:  # torchrun's rendezvous drops a node whose heartbeat seems 15 s old
        warning = f"the clock of {ahead['host']} is {apart:.0f} s ahead of that of {behind['host']}; torchrun may take"
        print(f"warning: {warning} a node for dead, so synchronise them (chrony, ntpd).", file=sys.stderr)


def check_same_adapter(adapter: dict[str, torch.Tensor], step: int) -> int:
    """The CRC-32 of the adapter after `step` updates, the same on every rank or UserError. Collective."""
    checksum = 0
    for name in sorted(adapter):
        checksum = zlib.crc32(adapter[name].contiguous().numpy(), checksum)
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([checksum]))
    checksums = [part.item() for part in gathered]
    usual = Counter(checksums).most_common(1)[0][0]
    different = [rank for rank, other in enumerate(checksums) if other != usual]
    if different:
        raise UserError(
            f"step {step}: rank{'s' * (len(different) > 1)} {', '.join(map(str, different))} of {len(checksums)} hold another "
            f"adapter than the rest, so a device or a link computes wrongly; replace that node and start the same command again: "
            f"it goes on from the last checkpoint."
        )
    return checksum


# ---------------------------------------------------------------------------------------------------------------------
# Fail


def dump_stacks(run_dir: Path, rank: int) -> None:
    """From now on this rank writes its stack to `stacks/rank-N.txt` when it crashes or is told to stop.

    torchrun sends SIGTERM to all other ranks as soon as it sees one fail, so the ranks that hung or waited are shown where
    they were. Raises UserError when this rank cannot write to the run folder.
    """
    path = run_dir / "stacks" / f"rank-{rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # never closed: a crash may come at the very end
    except OSError as error:
        raise UserError(
            f"rank {rank} on {socket.gethostname()} cannot write to {run_dir} ({error.strerror}); mend its permissions or choose "
            f"another --runs-dir."
        ) from error
    global stacks_path
    stacks_path = path
    os.write(file, f"--- {time.strftime('%F %T')}, {socket.gethostname()}, process {os.getpid()}\n".encode())
    faulthandler.enable(file)
    faulthandler.register(signal.SIGTERM, file, chain=True)


def report_failure(error: Exception, seconds_for_the_first: float = 5.0) -> int:
    """Say what ended this rank so that the first cause is read last; the exit code is 2 for a user's mistake, else 1.

    torchrun's report ends with the error file of the rank that it saw fail first, so the sentence goes there. A rank that
    merely lost a peer in a collective waits: torchrun then has the time to see the real one and to end this one unheard.
    """
    # torchrun's SIGTERM may come within milliseconds; it then waits until the error's own stack is in the file, since a
    # dump of this function would tell nothing.
    told_to_stop: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told_to_stop.append(number))
    rank, host = int(os.environ.get("RANK", 0)), socket.gethostname()
    try:
        message, stack = " ".join(str(error).split()), "".join(traceback.format_exception(error))
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)
        full = full or "(os error 28)" in message  # safetensors' words for ENOSPC
        if stacks_path and not full:
            with open(stacks_path, "a") as file:
                file.write(stack)
    except OSError as fault:  # of the error that ended the rank the user must hear all the same
        print(f"error: no stack in {stacks_path} ({fault})", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)  # as Python knows it, so from here on without a dump of this rank
        for number in told_to_stop:
            signal.raise_signal(number)
    if isinstance(error, UserError):
        sentence = message
    elif full:
        sentence = (
            f"rank {rank} on {host} could not write ({message}); free some space or mend the disk, then start the same command "
            f"again: it goes on from the last checkpoint."
        )
    elif isinstance(error, dist.DistError) or "gloo" in message:
        time.sleep(seconds_for_the_first)
        sentence = (
            f"rank {rank} on {host} lost another rank, which died, hung or never came ({message}); stacks/ in the run folder shows "
            f"where each rank was."
        )
    else:
        print(stack, file=sys.stderr)
        sentence = f"rank {rank} on {host} failed: {type(error).__name__}: {message}"
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file or rank == 0 or not isinstance(error, UserError):  # all ranks see a wrong flag, one tells it
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    if error_file:
        Path(error_file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
    return 2 if full or isinstance(error, UserError) else 1
