"""`rankcell grade FOLDER`: judge the notebooks of many students, each answer in a world of its own.

    command      the sub-command: what to judge, with which limits, what to write
    submissions  FOLDER -> notebooks, by student and lesson
    grading      for each answer an order; the course's own solutions first; many at a time
    stage        the process that answers are forked from, and their keepers;  sandbox  the walls around them
    judge        runs one answer and its checks
    results      judgements as a table, JUnit XML, CSV, and what nbgrader and GitHub Classroom read

`exercises` says which cells are an exercise and which it needs. Nothing of a student runs in the process that grades.
"""
