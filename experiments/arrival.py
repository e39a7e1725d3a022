"""How often does a proof let an image stop early? Certified halting of a trained model, by number of Euler steps.

    python experiments/arrival.py digits --data digits --steps 3 12 48
    odevit train digits-certified --set model.solver=euler --set model.depth=4 --set model.pool=sqrt_mean
    python experiments/arrival.py runs/digits-certified/model --data digits --steps 4 8 12 24 48

An image stops as soon as the steps left provably cannot change its answer (odevit.dynamics.arrival): the contraction
region of the head against a bound of how far the state can still go.
"""

import argparse

import torch
from studies import print_markdown

from odevit.commands.evaluate import load_data_for
from odevit.data import Split
from odevit.dynamics.arrival import Certified
from odevit.training.classifiers import load_odevit
from odevit.training.evaluation import model_input


@torch.no_grad()
def stopped(model: object, test: Split, num_steps: int) -> dict[str, str]:
    """Shares of the test images, and the steps that they take."""
    rule, early, steps, changed = Certified(model), 0, 0, 0
    for pixels, _ in test.stream(list(torch.arange(len(test)).split(256))):
        x = model_input(model, pixels)
        halted, full = model(x, halting=rule, num_steps=num_steps), model(x, num_steps=num_steps)
        early += int((halted.steps < num_steps).sum())
        steps += int(halted.steps.sum())
        changed += int((halted.logits.argmax(1) != full.logits.argmax(1)).sum())
    return {
        "images that stop early": f"{early / len(test):.1%}",
        "steps on average": f"{steps / len(test):.2f}",
        "answers that differ": f"{changed}",
    }


def main(arguments: list[str] | None = None) -> dict[str, dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    options = parser.parse_args(arguments)
    model = load_odevit(options.model)
    loaded = load_data_for(model, options.data)
    test = loaded.test or loaded.val
    rows = {f"K = {count}": stopped(model, test, count) for count in options.steps}
    print_markdown(f"{options.model}, {len(test):,} test images", rows)
    return rows


if __name__ == "__main__":
    main()
