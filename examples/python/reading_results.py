"""Reading results: finished runs as data frames, without training again. Run your_table.py first."""

import sys

import fedshift

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/your_table"
results = fedshift.results(folder)

runs = results.to_frame()  # a row for each run: method, target, seed, score, rounds, bytes, seconds
print(runs.pivot_table(index="method", columns="target", values="score"))

rounds = results.rounds_to_frame()  # a row for each round of each run
print(rounds.groupby(["method", "round"])[[name for name in rounds if name.startswith("losses/")]].mean())

worst = runs.loc[runs["score"].idxmin()]
print(results.model(worst["method"], worst["target"], int(worst["seed"])).card())
