"""What several files of tests share: a tiny dense checkpoint and its NVFP4 form."""

import pytest
from test_model_nvfp4_models import quantized, tiny_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_checkpoint("Llama", tmp_path_factory.mktemp("dense") / "source")


@pytest.fixture
def checkpoint(source, tmp_path):
    return quantized(source, tmp_path / "nvfp4")
