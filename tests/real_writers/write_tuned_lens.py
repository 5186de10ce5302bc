"""Write next-token log probabilities and logit lenses of tuned-lens, of the LMs it knows.

python write_tuned_lens.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import peer_lms
import transformers as hf
from tuned_lens.nn.lenses import LogitLens
from tuned_lens.plotting import PredictionTrajectory


def main(folder: Path) -> None:
    arrays = {}
    for name in peer_lms.LMS:
        peer_lms.save(name, folder / name)
        lm = hf.AutoModelForCausalLM.from_pretrained(folder / name).eval()
        tokenizer = hf.AutoTokenizer.from_pretrained(folder / name)
        try:
            lens = LogitLens.from_model(lm)
        except NotImplementedError:  # it knows few types
            continue
        arrays[name] = [
            # From the embeddings on, before the LM's own.
            PredictionTrajectory.from_lens_and_model(lens, lm, ids).log_probs[:, -1]
            for ids in tokenizer(list(peer_lms.PROMPTS))["input_ids"]
        ]
    np.savez(folder / "computed.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
