"""`veca.data.video`: frames of videos, whole, truncated and hostile, and `veca embed --fps`."""

from __future__ import annotations

import csv
import io
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import make_tiny
from PIL import Image
from sample_images import smooth_image, write_video
from typer.testing import CliRunner

import veca
from veca import images
from veca.cli.main import app
from veca.data import sources
from veca.data.video import FrameError, read_frames
from veca.embed import EmbedError, EmbedReport, EmbedSettings, embed

SETTINGS = EmbedSettings(cores=16, size=32, fit="stretch", decode="pillow", fps=2)


def frames_of(path: Path, fps: float = 2, **options: Any) -> dict[str, Image.Image]:
    found = read_frames(str(path), fps, **options)
    return {name.removeprefix(f"{path}#"): Image.open(io.BytesIO(data)) for name, data in found}


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov"])
def test_frames_are_those_at_their_times(tmp_path: Path, suffix: str) -> None:
    path = write_video(tmp_path / f"clip.{suffix}")
    frames = frames_of(path)
    assert list(frames) == ["0", "0.5", "1", "1.5", "2", "2.5", "3", "3.5", "4", "4.5"]
    for time, frame in frames.items():
        left, right = (np.asarray(frame)[:, part].mean() for part in (slice(0, 40), slice(56, None)))
        assert left == pytest.approx(5 * 10 * float(time), abs=6)
        assert right == pytest.approx(0, abs=6)
    assert len(frames_of(path, 1000)) == 50  # no frame twice
    assert list(frames_of(path, 0.4)) == ["0", "2.5"]


def test_frames_are_turned_upright(tmp_path: Path) -> None:
    """A camera held upright stores frames lying, with a matrix in `tkhd`: x' = -y + height, y' = x."""
    path = write_video(tmp_path / "clip.mp4", 1)
    data, one = path.read_bytes(), 1 << 16
    lying, upright = (0, one, 0, -one, 0, 0, 64 * one, 0, 1 << 30), (one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    start = data.index(struct.pack(">9i", *upright), data.index(b"tkhd"))
    path.write_bytes(data[:start] + struct.pack(">9i", *lying) + data[start + 36 :])
    frame = np.asarray(frames_of(path)["0.5"])
    assert frame.shape == (96, 64, 3)
    assert frame[:40].mean() == pytest.approx(25, abs=6)  # left became top
    assert frame[56:].mean() == pytest.approx(0, abs=6)


def test_a_truncated_video_gives_its_frames_and_the_reason(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mkv")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    frames: list[str] = []
    with pytest.raises(FrameError, match=r"truncated: its frames end at [123]\.\d s of 5\.0 s"):
        frames += (name for name, _ in read_frames(str(path), 2))
    names: list[str] = []
    items = list(sources.iter_items([str(path)], fps=2))
    names += [item.name.rpartition("#")[2] for item in items[:-1]]
    assert names[:2] == ["0", "0.5"]
    assert items[-1].name == str(path)
    assert "truncated" in items[-1].error


def test_hostile_videos_are_refused(tmp_path: Path) -> None:
    """Playlists would have FFmpeg open other files and addresses."""
    good = write_video(tmp_path / "good.mp4", 1)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{good.as_uri()}\n#EXT-X-ENDLIST\n"
    files = {"concat": f"ffconcat version 1.0\nfile '{good}'\n", "hls": playlist, "empty": "", "text": "no video" * 999}
    for name, text in files.items():
        (tmp_path / f"{name}.mp4").write_text(text)
        with pytest.raises(FrameError, match="damaged video, nothing was read after its start"):
            frames_of(tmp_path / f"{name}.mp4")
    with pytest.raises(FrameError, match=r"frames of 96×64; at most 1,000 pixels are read"):
        frames_of(good, max_pixels=1000)
    with pytest.raises(images.ImageError, match="pipe or device"):
        frames_of(Path("/dev/zero"))


def run(sources_: Any, out: Path, **options: Any) -> EmbedReport:
    settings = options.pop("settings", SETTINGS)
    model = make_tiny()
    return embed(sources_, out, model=model, model_name="tiny", settings=settings, workers=0, progress=False, **options)


def test_embed_writes_a_row_per_frame_with_its_time(tmp_path: Path) -> None:
    folder, out = tmp_path / "media", tmp_path / "features.parquet"
    folder.mkdir()
    clip = write_video(folder / "clip.mp4", 2)
    smooth_image().save(folder / "photo.png")
    (folder / "zbroken.mp4").write_bytes(b"none")
    report = run(folder, out)
    assert (report.pictures, report.failures) == (5, 1)
    rows = pq.read_table(out).to_pylist()
    assert [row["path"] for row in rows] == [*(f"{clip}#{t}" for t in ("0", "0.5", "1", "1.5")), f"{folder}/photo.png"]
    assert [row["time"] for row in rows[:4]] == [0, 0.5, 1, 1.5]
    assert math.isnan(rows[4]["time"])
    frame = frames_of(clip)["1.5"]
    expected = make_tiny()(images.load_image(frame, 32, "stretch")[None], cores=16).cls[0]
    assert rows[3]["cls"] == pytest.approx(expected.tolist(), abs=1e-4)
    listed = list(csv.reader(open(f"{out}.failures.csv")))  # noqa: SIM115
    assert [row[0] for row in listed] == ["path", f"{folder}/zbroken.mp4"]


def test_a_run_over_videos_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clips, out = [str(write_video(tmp_path / f"{name}.mp4", 1)) for name in "ab"], tmp_path / "features.parquet"
    read, asked = sources.read_frames, list[str]()

    def fail_in_the_second(path: str, *args: Any) -> Any:
        asked.append(path)
        if path == clips[1] and asked.count(path) == 2:  # first, the run looks whether there are frames
            raise OSError("the disk is gone")
        return read(path, *args)

    monkeypatch.setattr(sources, "read_frames", fail_in_the_second)
    with pytest.raises(EmbedError, match="the disk is gone"):
        run(clips, out)
    report = run(clips, out)
    assert (report.pictures, report.resumed) == (4, 2)


def test_without_fps_videos_are_left_out_and_said_so(tmp_path: Path) -> None:
    smooth_image().save(tmp_path / "photo.png")
    clip = write_video(tmp_path / "clip.mp4", 1)
    plain = EmbedSettings(cores=16, size=32)
    with pytest.warns(UserWarning, match=r"1 file was left out: .mp4 \(1\). Frames of videos are read by .*--fps 2"):
        report = run(tmp_path, tmp_path / "out.parquet", settings=plain)
    assert report.pictures == 1
    assert "time" not in pq.read_schema(tmp_path / "out.parquet").names
    with pytest.raises(veca.VecaError, match=r"clip.mp4: a video; .*--fps 2"):
        run(clip, tmp_path / "clip.parquet", settings=plain)
    ended = CliRunner().invoke(app, ["embed", str(clip), "--out", str(tmp_path / "x.parquet"), "--fps", "0"])
    assert "fps=0" in str(ended.exception)
