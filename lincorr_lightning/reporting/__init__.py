"""What a run leaves behind: ``results.json``, tables, figures. Figures are imported when drawn."""

from lincorr_lightning.reporting.files import (
    atomic_folder,
    atomic_write,
    check_writable,
    is_dry_run,
    run_folder,
    safe_names,
    save_figure,
    study_name,
    write_csv,
    write_json,
    write_picture,
)
from lincorr_lightning.reporting.probe_report import (
    CompletenessScore,
    PairScore,
    ProbeReport,
    RidgePoint,
)
from lincorr_lightning.reporting.summary import describe_run
from lincorr_lightning.reporting.tables import (
    Influence,
    influence_markdown,
    label_wise_rows,
    markdown_table,
    top_influences,
)

__all__ = [
    "CompletenessScore",
    "Influence",
    "PairScore",
    "ProbeReport",
    "RidgePoint",
    "atomic_folder",
    "atomic_write",
    "check_writable",
    "describe_run",
    "influence_markdown",
    "is_dry_run",
    "label_wise_rows",
    "markdown_table",
    "run_folder",
    "safe_names",
    "save_figure",
    "study_name",
    "top_influences",
    "write_csv",
    "write_json",
    "write_picture",
]
