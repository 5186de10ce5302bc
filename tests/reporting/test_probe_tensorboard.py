"""A probe's report in TensorBoard, read back with TensorBoard's own reader."""

import io
import re
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lincorr_lightning.probe.results import ProbeReport


@pytest.fixture(scope="module")
def events(
    report: ProbeReport, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EventAccumulator, Path]:
    folder = tmp_path_factory.mktemp("tensorboard")
    writer = SummaryWriter(folder)
    report.log_to_tensorboard(writer, step=7)
    writer.close()
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    return events, folder


def test_scalars(events: tuple[EventAccumulator, Path], report: ProbeReport) -> None:
    (score,) = [s for s in report.pairs if s.precision]
    for tag, value in (
        ("label_wise/city-country", score.label_mean),
        ("control/city-country", 0.2),
        ("hit1_influenced/city-country", 0.5),
        ("hit5_influencing/city-country", 1.0),
    ):
        (event,) = events[0].Scalars(tag)
        assert event.step == 7
        assert event.value == pytest.approx(value)
    tags = events[0].Tags()["scalars"]
    assert "label_wise/city-Xover2" in tags
    assert "hit1_influencing/city-country" not in tags, "NaN is not logged"
    assert not [tag for tag in tags if re.search(r"[^\w/.-]", tag)]


def test_pictures(events: tuple[EventAccumulator, Path], report: ProbeReport) -> None:
    tags = events[0].Tags()["images"]
    assert set(tags) == {f"figures/{name}" for name in report.pictures}
    for tag in tags:
        (event,) = events[0].Images(tag)
        image = Image.open(io.BytesIO(event.encoded_image_string))
        assert image.size == (event.width, event.height)


def test_text_tables(events: tuple[EventAccumulator, Path]) -> None:
    tags = [tag for tag in events[0].Tags()["tensors"] if tag.endswith("/text_summary")]
    assert set(tags) == {
        "pairs/text_summary", "top_influences/city-country/text_summary",
    }  # fmt: skip
    (event,) = events[0].Tensors("top_influences/city-country/text_summary")
    assert "✓" in event.tensor_proto.string_val[0].decode()
    (event,) = events[0].Tensors("pairs/text_summary")
    assert r"city-\>country" in event.tensor_proto.string_val[0].decode()


def test_settings_are_in_the_run_s_own_log(events: tuple[EventAccumulator, Path]) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert [path.name[:19] for path in events[1].rglob("*")] == ["events.out.tfevents"]
    content = events[0].PluginTagToContent("hparams")
    data = HParamsPluginData.FromString(content["_hparams_/session_start_info"])
    found = dict(data.session_start_info.hparams)
    assert found["ridge"].number_value == 0.0
    assert found["lm/name_or_path"].string_value == "tiny-world"
    assert found["ridge_grid"].string_value == "None"
    assert found["knowledges"].string_value == "['city', 'country']"
    experiment = HParamsPluginData.FromString(content["_hparams_/experiment"])
    metrics = {info.name.tag for info in experiment.experiment.metric_infos}
    assert "label_wise/city-country" in metrics
    assert metrics <= set(events[0].Tags()["scalars"])
