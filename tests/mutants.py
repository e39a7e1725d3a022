"""Do the tests of the mathematics fail when the mathematics is wrong? `make mutants` breaks it on purpose and counts.

Every mutation is one edit of one file of src/odevit, in a copy that lies before the real package on the path; the test
file named beside it must fail. test_mutants.py sees to it that every edit still applies, so that the list cannot rot.

    python tests/mutants.py [part of a name of a file or of a test …]
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

HEAVY = torch, AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel  # imported once, not in every child
ROOT = Path(__file__).parent.parent
GOAL = 0.9  # share of mutants that must be killed
SECONDS = 300  # a mutant that takes longer is killed


class Mutant(NamedTuple):
    file: str  # in src/odevit
    old: str  # occurs once
    new: str
    tests: str  # a file in tests, and after "-k" which of its tests


MUTATIONS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("model/solvers.py", "model/test_solvers.py"): [
        ("return x + h * field(x)\n", "return x + h * field(x) + h**2 * x\n"),
        ("    x = x + h * field.F(x)\n    return", "    return"),
        ("return x + (h / 2) * (k1 + k2)", "return x + h * k2"),
        ("    x = _heun(field.F, x, h / 2)\n    x = _heun(field.G, x, h)", "    x = _heun(field.F, x, h)"),
        ("    return _heun(field.F, x, h / 2)", "    return x + (h / 2) * field.F(x)"),
        ("field(x + (h / 2) * field(x))", "field(x + (h / 3) * field(x))"),
        ("k3 = field(x + (h / 2) * k2)", "k3 = field(x + (h / 2) * k1)"),
        ("(k1 + 2 * k2 + 2 * k3 + k4)", "(k1 + 2 * k2 + k3 + 2 * k4)"),
        ("yield phase, length / count", "yield phase, self.horizon / self.num_steps"),
        ("(u**3 - u**2) * h * field(x1)", "(u**3 - u**2) * field(x1)"),
        ("evaluations += 2", "evaluations += 1"),
        ("taken * cost.F, taken * cost.G", "taken, taken"),
    ],
    ("distill/meeting.py", "distill/test_meeting_times.py"): [
        ("tau = 3 * distances.mean()", "tau = distances.mean()"),
        ("horizon * PLACEMENTS[placement]", "PLACEMENTS[placement]"),
        ("[*times[:-1].tolist(), float(horizon)]", "times.tolist()"),
        ("max(1, int(quota))", "int(quota)"),
        ("quotas[layer] - seats[layer])", "seats[layer] - quotas[layer])"),
        ("knots, range(num_steps + 1))", "[i / num_steps for i in range(num_steps + 1)], range(num_steps + 1))"),
        ("enumerate(grid.times()[1:], start=1):", "enumerate((i / num_steps for i in range(1, num_steps + 1)), 1):"),
        ("latest = layers - (num_steps - step)", "latest = layers"),
    ],
    ("distill/meeting.py", "distill/test_meeting_steps.py"): [
        ("groupby(range(first, last), key=phases.__getitem__)", "groupby(range(first, last), key=lambda i: 0)"),
        ("(start - knots[first]) / dt", "0.0"),
        ("(end - start) / dt, phase", "1.0, phase"),
        ("start = before + begin * (after - before)", "start = before"),
        (".sum() * len(legs)", ".sum()"),
        ("< forced\n", "< 0.5\n"),
    ],
    ("distill/losses.py", "distill/test_losses.py"): [
        (".square().sum(dim=-1).mean(dim=1)", ".square().mean(dim=-1).mean(dim=1)"),
        ("(meeting.weights[:, tokens] * squared)", "squared"),
        ("slice(1, 1 + meeting.num_patches))\n", "slice(0, 1 + meeting.num_patches))\n"),
        ("meeting.path[-2])[:, :, 0,", "meeting.path[-1])[:, :, 0,"),
        ("(student - meeting.teacher_attention).abs()", "(student - meeting.teacher_attention).square()"),
        (" * temperature**2", ""),
        ("nnf.kl_div(said, meant,", "nnf.kl_div(meant, said,"),
    ],
    ("dynamics/bounds.py", "dynamics/test_bounds.py -k g_by_hand or g_bounds or g_stays or jasmin_takes or gelu"): [
        ("(others + x[..., k])", "(others + x[..., k - 1])"),
        ("rows.amax(dim=-1).mean()", "rows.mean(dim=-1).mean()"),
        ("log_g(1) - log_g(k)", "log_g(1)"),
        ("(1 + math.erf(1)) / 2 + math.exp(-1)", "(1 + math.erf(1)) / 2 + math.exp(-2)"),
        ("p.scatter(-1, index[..., k - 1 : k], 0).sum(dim=-1)", "1 - x[..., k - 1]"),
    ],
    ("dynamics/bounds.py", "dynamics/test_bounds_attained.py"): [
        ("return GELU_SLOPE * norm2(mlp.w1.weight)", "return 1.0 * norm2(mlp.w1.weight)"),
        ("math.sqrt(n) + 2 * c * (1 + math.sqrt(n))", "math.sqrt(n)"),
        ("norm2(p) * norm2(wv) + slope", "slope"),
        ("(norm2(k @ wq) + norm2(q @ wk))", "norm2(k @ wq)"),
        ("(norm2(k @ wq) + norm2(q @ wk))", "norm2(q @ wk)"),
        ("slope * norm2(v) * logits", "slope * norm2(v) * logits / 2"),
        ("norm2(attention.out.weight) * heads.square().sum(dim=-1).sqrt()", "heads.square().sum(dim=-1).sqrt()"),
        (" * heads.square().sum(dim=-1).sqrt()", " * heads.amax(dim=-1)"),
        ("math.isqrt(patches) + 2", "2"),
        (".flatten(1).amin(dim=1)\n", ".flatten(1).amax(dim=1)\n"),
        ("abs(field.scale) * (bound_F + bound_G)", "abs(field.scale) * torch.maximum(bound_F, bound_G)"),
        ("norm_bound(field.norm_f, x) * mlp_bound", "mlp_bound"),
    ],
    ("model/spectral.py", "model/test_spectral.py"): [
        ("(log_scale + last) / 2**iterations", "(log_scale + last) / 2 ** (iterations + 1)"),
        ("log_scale = 2 * (log_scale + size.log())", "log_scale = log_scale + size.log()"),
        ("(gram_norm(weight) / self.cap).clamp_min(1)", "(gram_norm(weight) / self.cap)"),
        ("weight.div_(torch.linalg.matrix_norm(weight.flatten(1), ord=2))", "weight.div_(weight.norm())"),
    ],
    ("dynamics/jacobian.py", "dynamics/test_jacobian.py"): [
        ("(push(v) + pull(v)) / 2", "push(v)"),
        ("found.value[:, 0].to(x.dtype)", "found.value[:, 0].to(x.dtype) ** 2"),
        ("norms.append(push(velocity)", "norms.append(push(torch.ones_like(velocity))"),
        ("torch.where(rate < 0, growth / _expm1_over(rate / num_steps), growth)", "growth"),
        ("largest / (2 * num_steps)", "largest / (2 * num_steps**2)"),
        (
            "torch.where(rate == 0, 1.0, torch.expm1(safe) / safe)",
            "torch.where(rate == 0, 0.5, torch.expm1(safe) / safe)",
        ),
    ],
    ("dynamics/lanczos.py", "dynamics/test_lanczos.py"): [
        ("for _ in range(2):  # once leaves", "for _ in range(0):  # once leaves"),
        ("values[:, -1].to", "values[:, 0].to"),
        ("* vectors[:, -1, -1].abs()", "* vectors[:, 0, -1].abs()"),
        ("size - size // like.shape[-1] if quotient", "size if quotient"),
        ("(c.double() @ p - lifted)", "(c.double() @ p)"),
        ("torch.where(zero, 0.0, values)", "values"),
        ("    for _ in range(3):\n", "    for _ in range(1):\n"),
    ],
    ("dynamics/exponents.py", "dynamics/test_exponents.py"): [
        ("found.value.log() / total_time", "found.value.log()"),
        ("found.upper.log() / total_time", "found.value.log() / total_time"),
        ("for layer in range(teacher.depth)", "for layer in range(1, teacher.depth)"),
        ("growth + diagonal.double().log()", "diagonal.double().log()"),
    ],
    ("dynamics/certificate.py", "dynamics/test_ball_bounds.py"): [
        ("GELU_BEND = math.sqrt(2 / math.pi)", "GELU_BEND = 0.0"),
        ("2 / math.sqrt(3) * slope / size", "1 / math.sqrt(3) * slope / size"),
        ("(length - r).clamp_min(0)", "length"),
        ("flatten(1).amin(dim=1)  # (b,)", "flatten(1).amax(dim=1)  # (b,)"),
        ("(2 * scale * (rows * r + alpha * r.square())).exp()", "torch.ones_like(rows * r)"),
        ("(2 * scale * (rows * r", "(scale * (rows * r"),
        ("scale * (logits + 2 * alpha * r)", "scale * logits"),
        ("diameter + math.sqrt(2) * value * r", "diameter"),
        ("curve * (wide * tau.square() + 2 * scale", "curve * (2 * scale"),
        (" + 2 * scale * alpha * values + ", " + "),
        (" + 2 * tau * value)", ")"),
        ("GELU_BEND * w2 * w1.square() * f1.square()", "GELU_BEND * w2 * w1 * f1"),
        (" + GELU_SLOPE * w1 * w2 * f2", ""),
        ("second * g1.square()", "second * g1"),
        (" + first * g2)", ")"),
        ("return abs(field.scale) * (mlp +", "return abs(field.scale) / 10 * (mlp +"),
        (" * math.sqrt(overlap)", ""),
        ("bound *= GELU_SLOPE", "bound *= 1.0"),
    ],
    ("dynamics/certificate.py", "dynamics/test_certificate.py -k nothing_is_left or linear or bent"): [
        ("step.norm * beyond + rest", "rest"),
        ("step.norm * beyond + rest\n", "step.norm * beyond\n"),
        ("left = left - readout * last(r)[1] / 2 * r.square()", "left = left"),
        ("left - step.adjoint * rest", "left"),
        ("adjoints[-2::-1], strict=False", "adjoints, strict=False"),
        ("_Step(h, bend, norm, span * entrance, ", "_Step(h, bend, norm, span * entrance / 10, "),
        ("reach[-1] * entrance * rho + beyond", "entrance * rho"),
        ("step.h / 2 * step.bend(r) * r.square()", "step.h / 20 * step.bend(r) * r.square()"),
        ("gradient if linear else entrance *", "gradient if linear else"),
        ("margins - slope * rho", "margins"),
        ("norms.append(1 + h * field_bound(field, x))", "norms.append(h * field_bound(field, x))"),
        ("[:, patches].flatten(1) if n * d", "[:, :1].flatten(1) if n * d"),
    ],
    ("analysis/attack.py", "dynamics/test_certificate.py -k linear or bent"): [
        ("torch.where(smallest.isfinite(), smallest * high, torch.inf)", "smallest * 2"),
    ],
    ("analysis/trajectory.py", "analysis/test_trajectory.py -k layer_errors"): [
        ("spread.clamp_min(1e-300)).sqrt().item()", "spread.clamp_min(1e-300)).item()"),
    ],
}


def mutants() -> Iterator[Mutant]:
    for (file, tests), edits in MUTATIONS.items():
        for old, new in edits:
            yield Mutant(file, old, new, tests)


def mutated(mutant: Mutant) -> str:
    """The file's text with the edit, which must apply exactly once."""
    text = (ROOT / "src" / "odevit" / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {text.count(mutant.old)} times, not once: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def passes(source: Path, tests: str) -> bool:
    """Whether these tests pass on the package that lies in `source`: in a child, which has torch imported."""
    file, *chosen = tests.split(" -k ")
    options = ["-x", "-q", "-p", "no:cacheprovider", *(["-k", *chosen] if chosen else [])]
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.chdir(ROOT / "tests")
        sys.path.insert(0, str(source))
        os._exit(pytest.main([*options, file]))
    begun = time.monotonic()
    while (waited := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - begun > SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(waited[1])
    if code not in (0, 1, -signal.SIGKILL):
        raise RuntimeError(f"pytest ended with {code} on {tests}")
    return code == 0


def main(wanted: list[str]) -> int:
    torch.set_num_threads(1)  # threads do not survive a fork
    sys.dont_write_bytecode = True  # two mutants within a second look the same to it
    chosen = [mutant for mutant in mutants() if not wanted or any(part in str(mutant) for part in wanted)]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for tests in sorted({mutant.tests for mutant in chosen}):
            if not passes(source, tests):
                raise SystemExit(f"{tests} fails without any mutation: mend that first")
        for number, mutant in enumerate(chosen, start=1):
            target, began = source / "odevit" / mutant.file, time.monotonic()
            original = target.read_text()
            target.write_text(mutated(mutant))
            survived = passes(source, mutant.tests)
            target.write_text(original)
            survivors += [mutant] if survived else []
            edit = f"{mutant.old.strip()!r} -> {mutant.new.strip()!r}"
            verdict = "SURVIVED" if survived else "killed"
            print(f"{number:3} {verdict:8} {time.monotonic() - began:4.0f} s  {mutant.file}: {edit}", flush=True)
    killed = 1 - len(survivors) / len(chosen)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed, {killed:.1%}; at least {GOAL:.0%} must be")
    for mutant in survivors:
        print(f"survivor: {mutant.file}: {mutant.old!r} -> {mutant.new!r} (tests/{mutant.tests})")
    return 0 if killed >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
