"""Write transcoders of circuit-tracer, in the files of its cache."""

import sys
from pathlib import Path

import torch
import yaml
from circuit_tracer.transcoder.activation_functions import JumpReLU, TopK
from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet

FOLDER = Path(sys.argv[1])
WIDTH, N, LAYERS = 16, 64, 2
ABOUT = {
    "feature_input_hook": "hook_resid_mid",
    "feature_output_hook": "hook_mlp_out",
    "scan": "user/repo",
}


def save(name: str, model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape)
    folder = FOLDER / name
    folder.mkdir()
    model.to_safetensors(str(folder))
    kind = "transcoder_set" if isinstance(model, TranscoderSet) else "cross_layer_transcoder"
    (folder / "config.yaml").write_text(yaml.dump(ABOUT | {"model_kind": kind}))


for name, function in (
    ("relu", torch.nn.functional.relu),
    ("jump_relu", JumpReLU(torch.zeros(N))),
    ("topk", TopK(5)),
):
    for skip in (False, True):
        layers = {
            i: SingleLayerTranscoder(WIDTH, N, function, i, skip, device=torch.device("cpu"))
            for i in range(LAYERS)
        }
        hooks = ("hook_resid_mid", "hook_mlp_out")
        save(f"{name}{', skip' if skip else ''}", TranscoderSet(layers, *hooks))
for name in ("relu", "jump_relu"):
    settings = {"activation_function": name, "lazy_decoder": False, "device": torch.device("cpu")}
    save(f"cross-layer {name}", CrossLayerTranscoder(LAYERS, N, WIDTH, **settings))
