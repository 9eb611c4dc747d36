"""Reporting: the HTML page and the tables of one or several runs.

Public names:
  run_report.report_runs: pages, plots and tables of runs, from their files alone.
  page.write_page, page.RunData: one page of curves and episodes.
  tables.before_after_table, tables.read_evaluation: the held-out evaluation of a run.

Must not import: `evaluation` and rooms above.
"""
