"""Policy: the transformer, its weights, its tokenizer, and their file formats.

Public names:
  config.PolicyConfig: the shape of a transformer.
  model.ModelConfig, model.read_model: a config's section that names a model's folder.
  transformer.hidden_states, transformer.logits, transformer.init: the forward pass, and weights.
  weights.load, weights.save: weights from and to a folder in Hugging Face's layout.
  tokenizer.load, tokenizer_base.Tokenizer: text to token ids and back.
  chat.Template: messages as a prompt, by the model's own template.
  lora.split, lora.join, lora.merge: adapters beside frozen weights.
  embedder.Embedder: embeddings of texts by a policy.

Must not import: `sampler`, `learner` and rooms above.
"""
