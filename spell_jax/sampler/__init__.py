"""Sampler: answers to prompts, decoded in JAX over a store of pages that prompts share.

Public names:
  config.SamplerConfig: slots, pages, temperature and limits.
  engine.Sampler: compiled programs of one policy on a mesh.
  session.Session: requests in, samples out, by continuous batching.
  requests.SampleRequest, requests.Options: a prompt, the number of answers, and how to sample.
  in_jit.sample: replies to prompts of one length, inside a jitted program of the caller.

Must not import: `learner`, which stands beside it, `selfplay` and rooms above.
"""
