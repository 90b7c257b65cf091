"""Command lines that `--help` shows; the tests parse each of them."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "compare": (
        "remat compare gpt2 --target v5e",
        "remat compare gpt2 --target h100 --policies none,save_dots,nothing --batch 16",
        "remat compare mypackage.train:make --target a100-80gb --budget 60GiB",
        "remat compare llama-3.1-8b --target v5e:4x4 --mesh fsdp=16",
    ),
    "fit": (
        "remat fit gpt2 --target h100 --max batch",
        "remat fit llama-3.2-1b --target v5p --max seq --policies nothing",
    ),
    "plan": (
        "remat plan gpt2 --target v5e --budget 12GiB -o plan.json",
        "remat plan mypackage.train:make --target h100 --no-offload --headroom 5%",
    ),
    "check": (
        "remat check plan.json",
        "remat check --all plans --tolerance 1%",
    ),
    "report": (
        "remat report gpt2 --target v5e --policy save_dots --html report.html",
        "remat report gpt2 --target h100 --policy nothing --against none",
        "remat report xla_dump/ --target v5e",
    ),
    "train": (
        "remat train gpt2-tiny --out run --steps 200",
        "remat train gpt2 --out run --policy plan.json --data corpus.txt",
        "remat train llama-tiny --out run --mesh fsdp=4,tensor=2 --dropout 0.1",
    ),
    "targets": ("remat targets",),
    "policies": ("remat policies", "remat policies save_dots"),
}


def examples(command: str) -> str:
    """The examples of a command, as the end of its help."""
    return "\n\n".join(["Examples:", *EXAMPLES[command]])
