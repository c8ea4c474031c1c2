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


def losses(folder, devices=None):
    """Of an evaluation and a step, of which the Trainer sends the number of targets."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=100, use_cache=False, **sizes)
    model = transformers.LlamaForCausalLM(config)
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_steps=1,
        logging_steps=1,
        label_names=["labels"],
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    given = model if devices is None else roundpipe.compile(model, devices=devices)
    trainer = transformers.Trainer(model=given, args=arguments, train_dataset=[*data()], eval_dataset=[*data()])
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    return evaluated, next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def test_losses_do_not_depend_on_the_number_of_devices(tmp_path):
    expected = losses(tmp_path)
    for number in (1, 2):
        assert losses(tmp_path, ["cpu"] * number) == pytest.approx(expected, abs=1e-5)
