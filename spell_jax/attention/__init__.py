"""Attention over packed rows and over pages: kernels, masks, rings.

Public names:
  attend.attend: attention of packed rows [B, T], by the kernel that suits the device.
  attend.packed: the same as a function that the policy calls, whole or as a ring over a mesh axis.
  paged.attend: attention of decoding over pages of keys and values.
  pages.Pages, pages.empty_pages, pages.write_pages, pages.write_tokens: the store of pages.

Must not import: `policy` and rooms above.
"""
