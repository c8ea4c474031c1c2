"""Weights in a checkpoint: safetensors, shards, tied weights, adapters, other devices."""

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.wrappers import checkpoint_files
from tests.wrappers.cases_checkpoint import Tied, adamw, assert_equal, clones, loss, piped, sgd


def test_tied_weights_are_saved_once_and_load_tied_or_not(tmp_path):
    with roundpipe.RoundPipe(Tied()) as model:
        optimizer = sgd(model)
        model.forward_backward((torch.arange(8).view(2, 4),), loss_fn=loss)
        model.step(lambda: optimizer.step(), is_async=False)
        model.save_checkpoint(tmp_path / "c", optimizer)
        expected = clones(model)
    saved, aliases = checkpoint_files.read_weights(tmp_path / "c")
    assert set(saved) == {"embedding.weight", "inner.weight", "inner.bias"}
    assert aliases == {"head.weight": "embedding.weight"}
    with roundpipe.RoundPipe(Tied()) as model:
        model.load_checkpoint(tmp_path / "c", sgd(model))
        assert_equal(clones(model), expected)
    with roundpipe.RoundPipe(Tied(tied=False)) as model:
        model.load_checkpoint(tmp_path / "c", weights_only=True)
        assert_equal(dict(model.state_dict()), {n: t for n, t in expected.items() if not n.startswith("optim")})


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (found[name], tensor)]
        assert torch.equal(*bits), name


def test_weights_are_safetensors_both_ways(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    shapes = ((), (3,), (0, 2), (5, 3))
    tensors = {f"{dtype} {shape}": torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES for shape in shapes}
    tensors["scales"] = torch.ones(3).to(torch.float8_e8m0fnu)
    for name, tensor in tensors.items():
        checkpoint_files.check_storable(name, tensor)
    checkpoint_files.write_weights(checkpoint_files.Draft(tmp_path), tensors, {})
    found = library.load_file(tmp_path / "model.safetensors")
    assert_same_bits(found, tensors)
    library.save_file(found, tmp_path / "model.safetensors")
    assert_same_bits(checkpoint_files.read_weights(tmp_path)[0], tensors)


def test_weights_that_the_library_would_refuse_are_written(tmp_path):
    memory, complex_ones = torch.arange(24.0), torch.randn(3, dtype=torch.complex64)
    tensors = {
        "transposed": torch.randn(3, 4).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "all": memory,
        "beginning": memory[:8],
        "overlapping": memory[4:12],
        "nothing": memory[6:6],
        "disjoint": torch.randn(8)[:3],
        "conjugated": complex_ones.conj(),
        "negative": complex_ones.conj().imag,
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpoint_files.write_weights(checkpoint_files.Draft(tmp_path), tensors, {})
    assert_same_bits(
        checkpoint_files.read_weights(tmp_path)[0], {n: t.resolve_conj().resolve_neg() for n, t in before.items()}
    )
    assert_equal(tensors, before)


def test_without_the_library_the_remedy_is_named(tmp_path, monkeypatch):
    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        with monkeypatch.context() as patched:
            for name in [name for name in sys.modules if name.split(".")[0] == "safetensors"]:
                patched.delitem(sys.modules, name)
            patched.setitem(sys.modules, "safetensors", None)
            for is_async in (False, True):
                with pytest.raises(ConfigError, match=r"pip install roundpipe\[hf\]"):
                    model.save_checkpoint(tmp_path / "c", is_async=is_async)
            with pytest.raises(ConfigError, match=r"pip install roundpipe\[hf\]"):
                model.load_checkpoint(tmp_path / "c")
        assert model.load_checkpoint(tmp_path / "c").step == 1


def test_a_library_without_numpy_is_as_good_as_none(monkeypatch):
    library = pytest.importorskip("safetensors.torch")

    def save(tensors):
        raise ModuleNotFoundError("No module named 'numpy'")

    monkeypatch.setattr(library, "save", save)
    checkpoint_files._dtype_entry.cache_clear()  # as in a new process
    with pytest.raises(ConfigError, match=r"pip install roundpipe\[hf\]"):
        checkpoint_files.check_storable("weight", torch.ones(1))


def test_all_files_can_be_read_by_those_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try:
        with piped() as model:
            model.save_checkpoint(tmp_path / "c")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()} == {0o640}


def test_a_compiled_model_resumes_on_other_devices(tmp_path):
    def run(workers, load):
        torch.manual_seed(3)
        model = roundpipe.compile(
            Tied().double(), example_args=(torch.arange(8).view(2, 4),), balance="size", devices=["cpu"] * workers
        )
        with model:
            optimizer = adamw(model)
            if load:
                assert model.load_checkpoint(tmp_path / "c", optimizer).step == 2
            for index in range(2 if load else 0, 4):
                tokens = (torch.arange(8).view(2, 4) + index) % 10
                config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
                model.forward_backward((tokens,), loss_fn=loss, run_config=config)
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                if index == 1:
                    model.save_checkpoint(tmp_path / "c", optimizer, step=2)
            model.synchronize()
            assert type(model) is roundpipe.RoundPipe
            return clones(model)

    expected = run(1, load=False)
    assert_equal(run(3, load=True), expected)


def test_shards_and_their_index(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files.write_weights, "__defaults__", (500,))
    with piped() as model:
        model.save_checkpoint(tmp_path / "c")
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert len(names) > 1 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys() and set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    with piped(seed=2) as model:
        model.load_checkpoint(tmp_path / "c")
        assert_equal(dict(model.state_dict()), expected)


@pytest.mark.parametrize("tie", [True, False])
def test_from_pretrained_reads_a_checkpoint(tmp_path, tie, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(checkpoint_files.write_weights, "__defaults__", (20_000,))
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tie,
    )  # fmt: skip
    original = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    expected = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    with roundpipe.AutoRoundPipe(original) as model:
        model.save_checkpoint(tmp_path / "c")
    assert ("lm_head.weight" in checkpoint_files.read_weights(tmp_path / "c")[0]) is not tie
    for kind in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
        # what transformers 5 does by itself
        loaded, info = kind.from_pretrained(tmp_path / "c", output_loading_info=True, torch_dtype="auto")
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert loaded.dtype == torch.bfloat16 and type(loaded) is transformers.LlamaForCausalLM
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tie
        assert_equal(loaded.state_dict(), expected)
    original.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    with roundpipe.AutoRoundPipe(original) as model:
        with pytest.raises(ConfigError, match="weights_only=True\\) reads them"):
            model.load_checkpoint(tmp_path / "theirs")
        model.load_checkpoint(tmp_path / "theirs", weights_only=True)
        assert_equal(dict(model.state_dict()), expected)


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


M_MMAP_THRESHOLD = -3
"""Of the C library's mallopt."""
needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs Linux's count of anonymous memory"
)


@contextlib.contextmanager
def watched_bytes():
    """The most anonymous memory taken since the last entry of the list was made.

    What the C library keeps of earlier tests goes back to the system first, and blocks of a megabyte and more do from
    then on when they are freed.
    """
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    library.malloc_trim(0)
    peaks_bytes, over = [0], threading.Event()
    before_bytes = anonymous_bytes()

    def watch():
        while not over.wait(0.002):
            peaks_bytes[-1] = max(peaks_bytes[-1], anonymous_bytes() - before_bytes)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks_bytes
    finally:
        over.set()
        thread.join()


@needs_proc
def test_writing_and_reading_take_no_second_copy_of_the_weights(tmp_path, monkeypatch):
    model = roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), pin_model="off")
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(checkpoint_files.write_weights, "__defaults__", (weight_bytes // 6,))
    with model, watched_bytes() as peaks_bytes:
        model.save_checkpoint(tmp_path / "c")
        peaks_bytes.append(0)
        model.load_checkpoint(tmp_path / "c")
        peaks_bytes.append(0)
        model.save_checkpoint(tmp_path / "c", is_async=True)
        model.synchronize()
    saving, loading, in_background = peaks_bytes
    assert saving < weight_bytes / 3 and loading < weight_bytes / 3
    assert 0.9 * weight_bytes < in_background < 1.3 * weight_bytes  # the copy that is documented, and a shard


@needs_proc
def test_what_must_be_copied_is_copied_a_shard_at_a_time(tmp_path):
    tensors = {f"{index}": torch.randn(2048, 2048).t() for index in range(8)}
    one_bytes = tensors["0"].nbytes
    with watched_bytes() as peaks_bytes:
        checkpoint_files.write_weights(checkpoint_files.Draft(tmp_path), tensors, {}, one_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    assert 0.9 * one_bytes < peaks_bytes[0] < 3 * one_bytes, peaks_bytes[0] / one_bytes  # of eight


def test_tied_weights_of_an_encoder_and_decoder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    original = transformers.T5ForConditionalGeneration(config)
    with roundpipe.AutoRoundPipe(original) as model:
        model.save_checkpoint(tmp_path / "c")
    assert checkpoint_files.read_weights(tmp_path / "c")[1].keys() >= {"encoder.embed_tokens.weight"}
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "c")
    assert_equal(loaded.state_dict(), original.state_dict())


def test_adapters_resume_and_leave_no_config_that_would_mislead(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    def adapted(seed):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        return roundpipe.AutoRoundPipe(peft.get_peft_model(transformers.LlamaForCausalLM(config), options))

    with adapted(1) as model:
        model.save_checkpoint(tmp_path / "c", adamw(model))
        expected = clones(model)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "checkpoint_manifest.json",
        "model.safetensors",
        "training_state.pt",
    ]
    with adapted(2) as model:
        model.load_checkpoint(tmp_path / "c", adamw(model))
        assert_equal(clones(model), expected)
