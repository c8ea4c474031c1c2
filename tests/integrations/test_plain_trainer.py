"""A wrapper in the place of the model in transformers' own Trainer: losses are those of the plain model."""

import pytest
import torch

import roundpipe

transformers = pytest.importorskip("transformers")


def data(size=8, length=12):
    generator = torch.Generator().manual_seed(1)
    for row in range(size):
        ids = torch.randint(1, 100, (length,), generator=generator)
        mask = torch.arange(length) < length - row
        yield {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def plain(**options):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=100, use_cache=False, **sizes, **options)
    return transformers.LlamaForCausalLM(config)


def tied():
    return plain(tie_word_embeddings=True)


def adapted():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    return peft.get_peft_model(plain(), config)


def trained(make, folder, devices=None):
    """Losses of an evaluation and a step, of which the Trainer sends the number of targets; and the checkpoint."""
    torch.manual_seed(0)
    model = make()
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    given = model if devices is None else roundpipe.compile(model, devices=devices)
    trainer = transformers.Trainer(model=given, args=arguments, train_dataset=[*data()], eval_dataset=[*data()])
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return [evaluated, loss], {path.name for path in (folder / "checkpoint-1").iterdir()}


@pytest.mark.parametrize("make", [plain, tied, adapted])
def test_losses_and_checkpoints_do_not_depend_on_the_number_of_devices(make, tmp_path):
    """Without a word of what the labels or the model's arguments are called: the wrapper's class tells."""
    expected, files = trained(make, tmp_path / "plain")
    for number in (1, 2):
        losses, saved = trained(make, tmp_path / str(number), ["cpu"] * number)
        assert losses == pytest.approx(expected, abs=1e-5)
        assert saved == files


def test_a_wrapper_is_of_its_own_class_and_of_the_models():
    model = plain()
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        assert isinstance(pipe, roundpipe.RoundPipe) and isinstance(pipe, transformers.LlamaForCausalLM)
        assert pipe.__class__ is type(model) and type(pipe) is roundpipe.RoundPipe
