"""`odevit recipes`: what is in the package, how it is run, and what came out."""

from rich.console import Console

from odevit.recipe import RECIPES, recipe_names


def recipes() -> dict[str, dict[str, str]]:
    """List the recipes of the package: what each does, its command, and its time and accuracy as its header says."""
    console, found = Console(), {name: header(name) for name in recipe_names()}
    for name, said in found.items():
        console.print(f"[bold]{name}[/]  {said['what']}", highlight=False, soft_wrap=True)
        console.print(f"    [cyan]{said['command']}[/]\n    {said['seen']}\n", highlight=False, soft_wrap=True)
    return found


def header(name: str) -> dict[str, str]:
    """The comment at the top of a recipe: what it is, the command, and what was seen; blank lines part them."""
    lines = []
    for line in (RECIPES / f"{name}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    parts = [" ".join(part.split()) for part in "\n".join(lines).split("\n\n")]
    return dict(zip(("what", "command", "seen"), parts, strict=True))
