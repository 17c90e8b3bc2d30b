"""Runs the benchmarks, one after the other, and writes their figures into one folder.

For each benchmark NAME.jsonl (its JSON lines) and NAME.md (its tables); for all together
figures.json and figures.png, the ratios of time with their quartiles.

    python benchmarks/run.py --quick
    python benchmarks/run.py --only window stream --rounds 12
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
# Those that any machine can run; clusters.py needs the compilers of TPU and GPU.
NAMES = (
    "window", "stream", "systems", "precision", "losses", "window_axis", "tracing", "memory",
    "sharding", "multihost",
)  # fmt: skip


def run(name: str, options: list[str], folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of one benchmark; its JSON lines and its tables are written to the folder."""
    command = [sys.executable, str(HERE / f"{name}.py"), *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    tables = done.stderr[done.stderr.find("### ") :] if "### " in done.stderr else done.stderr
    (folder / f"{name}.md").write_text(f"# {name}\n\n{tables}")
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in lines]


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """The ratios of time, a panel for each table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if isinstance(row.get("time ratio"), list):
            tables.setdefault(f"{row['benchmark']}: {row['table']}", []).append(row)
    if not tables:
        return
    heights = [len(group) + 1 for group in tables.values()]
    figure, panels = plt.subplots(
        len(tables), 1, figsize=(9, 0.32 * sum(heights) + 0.6 * len(tables)), squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    for axes, (title, group) in zip(panels[:, 0], tables.items(), strict=True):
        for place, row in enumerate(reversed(group)):
            lower, middle, upper = row["time ratio"]
            ours = "jaxaccum" in row["side"]
            axes.barh(place, middle, color="#2e6f95" if ours else "#aaaaaa", height=0.7)
            axes.plot([lower, upper], [place, place], color="black", linewidth=1)
        axes.set_yticks(range(len(group)), [f"{r['side']} / {r['over']}" for r in reversed(group)])
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("time over that of the other side, median and quartiles", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small runs that show it works")
    parser.add_argument("--rounds", type=int, help="timed rounds of each comparison")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "out", help="the folder")
    args = parser.parse_args()
    options = ["--quick"] if args.quick else []
    options += ["--rounds", str(args.rounds)] if args.rounds else []
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in args.only:
        start = time.perf_counter()
        rows += run(name, options, args.out)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    (args.out / "figures.json").write_text(json.dumps(rows, indent=1))
    draw(rows, args.out / "figures.png")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
