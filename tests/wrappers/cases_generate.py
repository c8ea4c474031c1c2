"""What the tests of `generate` share: small models, a prompt with padding, devices with limits."""

import torch

import roundpipe

VOCAB = 96


def llama(layers=4, **options):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **sizes | options)
    return transformers.LlamaForCausalLM(config).double().eval()


def weight_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def limited(num_bytes):
    return roundpipe.Device("cpu", memory_bytes=int(num_bytes))


def uploaded_bytes(piped):
    backend = piped._session.engine.backends[0]  # what goes over the link is shown nowhere else
    return sum(backend.moved_bytes)


def prompt():
    tokens = torch.randint(3, VOCAB, (3, 6))
    mask = torch.ones_like(tokens)
    tokens[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}
