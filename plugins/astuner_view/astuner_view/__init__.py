"""The viewer: a local server that reads run folders, and the page that it serves.

::

    runs        lists run folders and their IDs
    book        state of one run, from its small files: metrics, certificate, alarms, state
    log_thread  the episode log of one run, read in its own thread
    episodes    an episode as JSON for the page, with what happened to its tokens; `texts` decodes them
    app         access control and request handling; `page` the built page
    serving     socket, address, server
    export      one run as a single page

Invariant: nothing in a run folder is written except labels and the log's index, which is derived; names in requests are
looked up, and never become part of a path.
"""
