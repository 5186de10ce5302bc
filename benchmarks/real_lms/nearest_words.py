"""How near the answers of the stored edits are to their references in each LM's head.

    python -m benchmarks.real_lms.nearest_words FOLDER

FOLDER holds a folder for each LM, of which the tokenizer and the head are read. The risk by the
nearest word in the causal inner product goes into the column ``nearest_risk`` of all stored edits;
``vocabulary_risk`` is that by the cosine of centered rows, as earlier versions measured it.
"""

from pathlib import Path

import torch
from jsonargparse import auto_cli

from benchmarks.common import lms_in, write_text
from benchmarks.real_lms.edits import read_cases
from benchmarks.real_lms.run import PLAN, REAL_LMS
from lincorr_lightning.finetune.edit_files import SEPARATOR, read_edits
from lincorr_lightning.finetune.edits import (
    ListedEdits,
    plan_edits,
    reference_mask,
    taught_labels,
)
from lincorr_lightning.functional import risk
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm import LanguageModel, LMConfig
from lincorr_lightning.lm.nearest_words import NearestWords
from lincorr_lightning.lm.stored_rows import stored_head


def main(folder: str, output: str = str(REAL_LMS)) -> None:
    """Add the risk by the nearest word to all stored edits.

    Args:
        folder: Folder that holds a folder for each LM.
        output: Folder of the results.
    """
    catalogue = Catalogue.load()
    for path in lms_in(folder):
        lm = LanguageModel(LMConfig(str(path)))
        assert lm.checkpoint is not None
        words = NearestWords(stored_head(lm.checkpoint, lm.tokenizer), path.name)
        for name in PLAN["edited"]:
            relation = TokenizedRelation.of(name, catalogue, lm.tokenizer)
            near = words.weights(relation.source.token_ids, relation.target.token_ids).T
            files = (Path(output) / path.name).glob(f"*_{name.replace('->', '_to_')}.csv")
            for file in sorted(files):
                cases = read_cases(file)
                columns = ["subject", "source_answer", "reference"]
                rows = [
                    {"subject": subject, "answer": answer, "reference": right.split(SEPARATOR)}
                    for subject, answer, right in cases[columns].itertuples(index=False)
                ]
                edits = plan_edits(ListedEdits(read_edits(rows)), relation, lm).edits
                assert len(edits) == len(cases), f"{file} has rows that are no edit of {path}"
                risks = risk(near[taught_labels(edits)], reference_mask(edits, near.shape[1]))
                cases["nearest_risk"] = [round(x, 6) for x in risks.tolist()]
                write_text(file, cases.to_csv(index=False))
                print(f"{path.name}: {file.stem}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(2)
    auto_cli(main)
