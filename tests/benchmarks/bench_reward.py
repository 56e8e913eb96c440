r"""The answer checker beside Math-Verify 0.9.0 on the labelled corpus: accuracy, wrong verdicts, latency, throughput.

    pip install "math-verify[antlr4_13_2]==0.9.0"   # in an environment of its own: it is there for this table only
    python tests/benchmarks/bench_reward.py --other-python /path/to/that/bin/python

The graders run one after the other, in processes of their own on the same machine, over the same completions: `answer`
cases are wrapped in \boxed{}, the others are graded as they are. Math-Verify runs with its defaults: its own
extraction, which reads prose, and its own timeout. So that the columns compare, "lenient" extracts from completions
without a box too; "strict" is reward.py as in training. "free" are the cases whose label hangs on no convention.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("verifier_cases", "verifier_issue_cases", "verifier_adversarial_cases", "verifier_math500_cases")


def our_grader(lenient: bool):
    sys.path.insert(0, str(ROOT))
    from math_answers import is_correct
    from reward import extract_answer

    return lambda completion, gold: is_correct(extract_answer(completion, lenient=lenient), gold).equal


def math_verify_grader():
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it prints whole bombs
    # The gold answers come without delimiters; Math-Verify's README asks for them around LaTeX.
    return lambda completion, gold: bool(verify(parse(f"${gold}$"), parse(completion)))


def measure(grader: str, data: Path) -> None:
    """Print one JSON object: per file (right?, false positive?, free?, seconds) of every case, and AIME checks/s."""
    judge = math_verify_grader() if grader == "Math-Verify" else our_grader(lenient=grader == "lenient")
    judge(r"\boxed{e^{\ln 3}}", "3")  # imports and caches are no part of the latency
    results = {}
    for name in FILES:
        results[name] = []
        for line in (data / f"{name}.jsonl").read_text().splitlines():
            case = json.loads(line)
            completion = rf"\boxed{{{case['pred']}}}" if case["kind"] == "answer" else case["pred"]
            start = time.perf_counter()
            equal = judge(completion, case["gold"])
            seconds = time.perf_counter() - start
            results[name].append((equal == case["equal"], equal and not case["equal"], case["policy"] is None, seconds))
    texts = [(f"So the answer is \\boxed{{{k % 1000:03d}}}.", str(7 * k % 1000)) for k in range(2_000)]
    start = time.perf_counter()
    for completion, gold in texts:
        judge(completion, gold)
    results["AIME checks a second"] = len(texts) / (time.perf_counter() - start)
    print(json.dumps(results))


def print_table(measured: dict[str, dict]) -> None:
    print(f"{'file':<28}{'grader':<13}  free  FP  FN     all  FP  median ms   p99 ms   max ms")
    for name in FILES:
        for grader, results in measured.items():
            rows = results[name]
            free = [row for row in rows if row[2]]
            times = sorted(row[3] * 1e3 for row in rows)
            right, false = sum(row[0] for row in free), sum(row[1] for row in free)
            print(
                f"{name:<28}{grader:<13}{right / len(free):>6.4f}{false:>4}{len(free) - right - false:>4}"
                f"{sum(row[0] for row in rows) / len(rows):>8.4f}{sum(row[1] for row in rows):>4}"
                f"{times[len(rows) // 2]:>11.3f}{times[len(rows) * 99 // 100]:>9.2f}{times[-1]:>9.1f}"
            )
    for grader, results in measured.items():
        print(f"{grader}: {results['AIME checks a second']:,.0f} AIME-style checks a second on one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of verifier_*.jsonl")
    parser.add_argument("--other-python", default=sys.executable, help="interpreter that can import Math-Verify")
    parser.add_argument("--measure", choices=("lenient", "strict", "Math-Verify"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.data)
        return
    measured = {}
    for grader, python in (
        ("lenient", sys.executable),
        ("strict", sys.executable),
        ("Math-Verify", args.other_python),
    ):
        command = [python, __file__, "--measure", grader, "--data", args.data]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if process.returncode == 0:
            measured[grader] = json.loads(process.stdout.splitlines()[-1])
        else:
            print(f"{grader} did not run under {python}: see the error above.", file=sys.stderr)
    print_table(measured)


if __name__ == "__main__":
    main()
