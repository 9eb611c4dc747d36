"""Serving: an HTTP server that answers with a policy, in OpenAI's protocol.

Public names:
  server.serve: the body of spell_jax/serve.py: loads a policy, listens, and ends in order.
  app.App: routes of the server.
  service.Service: the thread with the one session that answers all requests.
  scoring.Scorer: logprobs of whole sequences, with the likeliest tokens beside them.
  protocol.read_call, protocol.Call: a request's body, checked field by field.

Must not import: `trainer`, `config`, `algorithms` and `question_sets`.
"""
