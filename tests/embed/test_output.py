"""The layout of feature files: types, defaults, row groups and compression, and that other programs read them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_embed import go, interrupted, model, photos, small_partitions  # noqa: F401

from veca.embed import EmbedError, EmbedSettings, partitions


def _cls(out: Path) -> np.ndarray:
    column = pq.read_table(out, columns=["cls"])["cls"].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=True).reshape(-1, 32)


@pytest.mark.parametrize(("dense", "dtype"), [(False, "float32"), (True, "float16")])
def test_the_default_type_follows_from_dense(photos, tmp_path, model, dense, dtype):  # noqa: F811
    settings = EmbedSettings(cores=8, size=32, batch=2, dense=dense)
    go(photos, tmp_path / "f.parquet", model, settings)
    assert _cls(tmp_path / "f.parquet").dtype == dtype
    interrupted(photos, tmp_path / "g.parquet", model, settings)
    named, other = (
        EmbedSettings(cores=8, size=32, batch=2, dense=dense, save_dtype=each)
        for each in (dtype, {"float32": "float16", "float16": "float32"}[dtype])
    )
    with pytest.raises(EmbedError, match=f"save_dtype was {dtype}"):
        go(photos, tmp_path / "g.parquet", model, other)
    assert go(photos, tmp_path / "g.parquet", model, named).resumed > 0  # the default by its name


def test_row_groups_of_a_file_are_merged_up_to_a_limit(photos, tmp_path, model, monkeypatch):  # noqa: F811
    settings = EmbedSettings(cores=8, size=32, batch=2, dense=True)

    def groups(name: str) -> list[int]:
        go(photos, tmp_path / name, model, settings)
        footer = pq.read_metadata(tmp_path / name)
        return [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]

    assert groups("one.parquet") == [11]
    monkeypatch.setattr(partitions, "GROUP_ROWS", 8)
    assert groups("rows.parquet") == [7, 4]  # partitions of four images, one of them broken
    monkeypatch.setattr(partitions, "GROUP_BYTES", 1)
    assert groups("bytes.parquet") == [3, 4, 4]
    tables = [pq.read_table(tmp_path / f"{name}.parquet") for name in ("one", "rows", "bytes")]
    assert all(a == b for a, b in pairwise(tables))


def test_small_columns_are_compressed_and_features_are_not(photos, tmp_path, model):  # noqa: F811
    go(photos, tmp_path / "f.parquet", model, EmbedSettings(cores=8, size=32, dense=True))
    group = pq.read_metadata(tmp_path / "f.parquet").row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    assert {column.compression for column in columns[:6]} == {"ZSTD"}
    assert {column.compression for column in columns[6:]} == {"UNCOMPRESSED"}
    assert columns[0].statistics.max.endswith("09.png")


def test_patches_survive_storage_as_bytes(tmp_path):
    """Of any number per row, and of a table that is a slice of another."""
    about = {"save_dtype": "float16", "dim": 2, "with_global": False, "dense": True}
    schema = partitions.feature_schema(about)
    rows = [[1.0, -2.0], [0.5, 3.0, 4.0, 5.0], [6.0, 7.0]]
    values = [np.array(row, np.float16) for row in rows]
    columns = {name: [1, 2, 3] for name in schema.names[1:6]} | {"path": ["a", "b", "c"], "patches": values}
    table = pa.table({name: columns[name] for name in schema.names}, schema).slice(1)
    folder = partitions.PartitionFolder(tmp_path)
    with partitions.FeatureWriter(tmp_path / "f.parquet", schema, checksums=True) as writer:
        writer.write_table(table)
    stored = pq.read_table(tmp_path / "f.parquet")["patches"].to_pylist()
    assert [np.frombuffer(row, "<f2").tolist() for row in stored] == rows[1:]
    assert next(folder.read_tables(["f.parquet"], schema)) == table


@pytest.mark.parametrize("out", ["f.parquet", "folder"])
@pytest.mark.parametrize("program", ["duckdb", "polars"])
def test_other_programs_read_vectors(photos, tmp_path, model, program, out):  # noqa: F811
    module = pytest.importorskip(program)
    go(photos, tmp_path / out, model, EmbedSettings(cores=8, size=32, batch=2))
    files = str(tmp_path / out if out.endswith(".parquet") else tmp_path / out / "0*.parquet")
    if program == "polars":
        found = module.scan_parquet(files).select("cls").collect()["cls"]
        assert found.dtype == module.Array(module.Float32, 32)
        found = found.to_numpy()
    else:
        found = module.sql(f"SELECT cls::FLOAT[32] AS cls FROM '{files}'").fetchnumpy()["cls"]
    np.testing.assert_array_equal(np.stack(list(found)), _cls(tmp_path / out))
