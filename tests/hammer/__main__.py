"""Random calls for so many minutes: ``python -m tests.hammer --minutes 30``. Ends with 1 where anything was found."""

import argparse
import random
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from hypothesis import seed as with_seed  # noqa: E402
from hypothesis.stateful import run_state_machine_as_test  # noqa: E402
from machine import machine, sequences  # noqa: E402
from world import BY_NAME, CALLS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hammer", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--families", nargs="*", default=sorted(BY_NAME), choices=sorted(BY_NAME), metavar="FAMILY")
    parser.add_argument("--seed", type=int, default=None, help="of the first sequence (drawn otherwise)")
    parser.add_argument("--steps", type=int, default=20, help="calls and changes of a sequence")
    parser.add_argument("--shrink", action="store_true", help="make sequences that fail as short as they can be")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    draw = random.Random(arguments.seed)
    end = time.monotonic() + 60.0 * arguments.minutes
    found: dict[str, int] = {}
    count = 0
    while time.monotonic() < end:
        family, number = draw.choice(arguments.families), draw.randrange(2**32)
        done = f"{sum(CALLS.values())} calls, {CALLS['Ctrl-C that came']} interruptions, {sum(found.values())} findings"
        print(f"{end - time.monotonic():6.0f} s left, {done}: {family}, seed {number}", file=sys.stderr, flush=True)
        case = with_seed(number)(machine(family))
        count += 1
        try:
            drawn = sequences(2, arguments.steps, random=True, shrink=arguments.shrink)
            run_state_machine_as_test(case, settings=drawn)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not getattr(error, "__notes__", None):
                break
            name = f"{type(error).__name__}: {re.sub(r'[0-9]+', 'N', str(error).partition(chr(10))[0])[:120]}"
            found[name] = found.get(name, 0) + 1
            if found[name] <= 3:
                print(f"\n== {family}, seed {number}: {type(error).__name__}: {str(error)[:600]}")
                print("\n".join(getattr(error, "__notes__", [])))
                traceback.print_exception(error.with_traceback(error.__traceback__), limit=-6)
                sys.stdout.flush()
    print(f"\n{count} sequences; {sum(CALLS.values())} calls and changes:")
    for what, times in sorted(CALLS.items()):
        print(f"{times:8} {what}")
    for name, times in sorted(found.items(), key=lambda item: -item[1]):
        print(f"FOUND {times} times: {name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
