"""Public reports of what a code finds: issues and pull requests of several projects.

From threads as they were up to September 2026; each shows the kind of error, not that the project
still has it.
"""

REPORTS: dict[str, tuple[str, ...]] = {
    "DPA101": ("radixark/miles/pull/3125",),
    "DPA103": (
        "verl-project/verl/pull/6089", "hpcaitech/ColossalAI/issues/3622", "THUDM/slime/pull/1135",
        "huggingface/trl/pull/6095",
    ),
    "DPA109": ("verl-project/verl/issues/1576",),
    "DPA113": ("om-ai-lab/VLM-R1/issues/129", "verl-project/verl/issues/2996"),
    "DPA114": (
        "verl-project/verl/issues/148", "verl-project/verl/issues/1134",
        "TIGER-AI-Lab/verl-tool/pull/77", "modelscope/ms-swift/pull/9921",
    ),
    "DPA115": ("verl-project/verl/pull/4030",),
    "DPA116": ("verl-project/verl/pull/3699",),
    "DPA117": (
        "verl-project/verl/pull/115", "verl-project/verl/issues/149", "NVIDIA-NeMo/RL/issues/648",
    ),
    "DPA118": ("verl-project/verl/pull/4656",),
    "DPA119": ("verl-project/verl/issues/3088",),
    "DPA202": ("rllm-org/rllm/pull/517",),
    "DPA204": ("OpenRLHF/OpenRLHF/issues/217",),
    "DPA205": (
        "verl-project/verl/issues/3805", "CarperAI/trlx/pull/509", "huggingface/trl/issues/7024",
    ),
    "DPA206": ("OpenRLHF/OpenRLHF/issues/238",),
    "DPA208": (
        "verl-project/verl/pull/3287", "THUDM/slime/issues/1563", "NovaSky-AI/SkyRL/pull/1319",
    ),
    "DPA209": ("PeterGriffinJin/Search-R1/pull/21",),
    "DPA210": ("huggingface/trl/pull/4976",),
    "DPA211": ("rllm-org/rllm/pull/508",),
    "DPA212": (
        "verl-project/verl/pull/782", "NVIDIA-NeMo/RL/issues/158", "alibaba/ROLL/issues/475",
    ),
    "DPA213": ("areal-project/AReaL/issues/217",),
    "DPA214": ("huggingface/trl/issues/5785",),
    "DPA301": ("OpenRLHF/OpenRLHF/pull/1240", "NVIDIA-NeMo/RL/pull/4154"),
    "DPA303": (
        "huggingface/trl/pull/3029", "NovaSky-AI/SkyRL/issues/2246",
        "PrimeIntellect-ai/prime-rl/pull/697", "radixark/miles/pull/1829",
    ),
    "DPA304": (
        "verl-project/verl/issues/751", "NVIDIA-NeMo/RL/issues/2100",
        "PrimeIntellect-ai/prime-rl/pull/2084",
    ),
    "DPA305": ("huggingface/trl/issues/3500",),
    "DPA308": ("verl-project/verl/issues/6278",),
    "DPA309": ("rllm-org/rllm/issues/816", "NovaSky-AI/SkyRL/pull/2148"),
    "DPA310": (
        "verl-project/verl/issues/3487", "verl-project/verl/pull/3724",
        "verl-project/verl/pull/4250",
    ),
    "DPA312": ("THUDM/slime/issues/830",),
    "DPA401": ("rllm-org/rllm/pull/776",),
    "DPA405": (
        "verl-project/verl/issues/6476", "verl-project/verl/pull/6310",
        "huggingface/trl/issues/3750", "OpenRLHF/OpenRLHF/pull/1239",
    ),
    "DPA408": (
        "verl-project/verl/pull/7581", "THUDM/slime/issues/1414", "NVIDIA-NeMo/RL/pull/4158",
        "PrimeIntellect-ai/prime-rl/pull/600", "StarsfieldAI/R1-V/issues/67",
        "radixark/miles/pull/1827",
    ),
    "DPA409": ("areal-project/AReaL/pull/1346", "deepspeedai/DeepSpeedExamples/pull/672"),
    "DPA411": ("huggingface/trl/issues/6533",),
    "DPA413": ("jsboige/CoursIA/issues/10603",),
    "DPA414": ("verl-project/verl/pull/1440",),
    "DPA502": (
        "verl-project/verl/issues/5625", "verl-project/verl/pull/3332",
        "verl-project/verl/issues/3741", "NovaSky-AI/SkyRL/pull/1420",
    ),
    "DPA503": ("huggingface/trl/issues/6369", "allenai/open-instruct/pull/535"),
    "DPA604": ("OpenRLHF/OpenRLHF/pull/1319",),
    "DPA607": (
        "THUDM/slime/issues/1695", "huggingface/trl/issues/5312", "rllm-org/rllm/issues/291",
        "allenai/open-instruct/issues/1473",
    ),
    "DPA608": ("huggingface/trl/issues/6668",),
    "DPA609": ("meta-pytorch/torchforge/pull/571",),
    "DPA610": ("allenai/open-instruct/pull/1202",),
    "DPA704": ("verl-project/verl/pull/7553",),
}  # fmt: skip
"""Code -> threads on github.com, the most telling first."""
