r"""The answer checker beside Math-Verify 0.9.0 on the labelled corpus: accuracy, wrong verdicts, latency, throughput.

    pip install "math-verify[antlr4_13_2]==0.9.0"     # in an environment of its own: it is installed for this table only
    python tests/benchmarks/bench_reward.py           # prints the table; --data DIR for a corpus elsewhere

Both graders run one after the other in processes of their own on the same machine, over the same completions: `answer` cases are
wrapped in \boxed{}, the others are graded as they are. Math-Verify runs with its defaults: its own extraction, its own timeout.
Completions without a box (kind `response_nobox`) are in the all-cases columns: reward.py never pays them, which is what a policy
should learn from; Math-Verify reads the prose. "free" are the cases whose label hangs on no convention.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("verifier_cases", "verifier_issue_cases", "verifier_adversarial_cases", "verifier_math500_cases")


def completion_of(case: dict) -> str:
    return rf"\boxed{{{case['pred']}}}" if case["kind"] == "answer" else case["pred"]


def our_grader():
    sys.path.insert(0, str(ROOT))
    from reward import reward

    return lambda completion, gold: reward(completion, gold) == 1.0


def math_verify_grader():
    from math_verify import parse, verify

    # The gold answers come without delimiters; Math-Verify's README asks for them around LaTeX.
    return lambda completion, gold: bool(verify(parse(f"${gold}$"), parse(completion)))


def measure(grader: str, data: Path) -> None:
    """Print one JSON object: per file (equal as labelled?, false positive?, free?, seconds) of every case, and AIME checks/s."""
    judge = {"reward.py": our_grader, "Math-Verify": math_verify_grader}[grader]()
    judge(r"\boxed{e^{\ln 3}}", "3")  # imports and caches are no part of the latency
    results = {}
    for name in FILES:
        results[name] = []
        for line in (data / f"{name}.jsonl").read_text().splitlines():
            case = json.loads(line)
            start = time.perf_counter()
            equal = judge(completion_of(case), case["gold"])
            seconds = time.perf_counter() - start
            results[name].append((equal == case["equal"], equal and not case["equal"], case["policy"] is None, seconds))
    texts = [(f"So the answer is \\boxed{{{k % 1000:03d}}}.", str(7 * k % 1000)) for k in range(2_000)]
    start = time.perf_counter()
    for completion, gold in texts:
        judge(completion, gold)
    results["AIME checks a second"] = len(texts) / (time.perf_counter() - start)
    print(json.dumps(results))


def print_table(measured: dict[str, dict]) -> None:
    print(
        f"{'file':<28}{'grader':<13}{'free':>6}{'FP':>4}{'FN':>4}{'all':>8}{'FP':>4}{'median ms':>11}{'p99 ms':>9}{'max ms':>9}"
    )
    for name in FILES:
        for grader, results in measured.items():
            rows = results[name]
            free = [row for row in rows if row[2]]
            seconds = sorted(row[3] for row in rows)
            right, false = sum(row[0] for row in free), sum(row[1] for row in free)
            print(
                f"{name:<28}{grader:<13}{right / len(free):>6.4f}{false:>4}{len(free) - right - false:>4}"
                f"{sum(row[0] for row in rows) / len(rows):>8.4f}{sum(row[1] for row in rows):>4}"
                f"{seconds[len(rows) // 2] * 1e3:>11.3f}{seconds[len(rows) * 99 // 100] * 1e3:>9.2f}{seconds[-1] * 1e3:>9.1f}"
            )
    for grader, results in measured.items():
        print(f"{grader}: {results['AIME checks a second']:,.0f} AIME-style checks a second on one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder with verifier_*.jsonl"
    )
    parser.add_argument(
        "--other-python", default=sys.executable, help="interpreter of the environment that has Math-Verify"
    )
    parser.add_argument("--measure", choices=("reward.py", "Math-Verify"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.data)
        return
    measured = {}
    for grader, python in (("reward.py", sys.executable), ("Math-Verify", args.other_python)):
        command = [python, __file__, "--measure", grader, "--data", args.data]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if process.returncode == 0:
            measured[grader] = json.loads(process.stdout.splitlines()[-1])
        else:
            print(f"{grader} did not run under {python}: see the error above.", file=sys.stderr)
    print_table(measured)


if __name__ == "__main__":
    main()
