"""The viewer: a server on this machine that reads run folders, and the page that it serves.

::

    runs        which run folders there are, and what each is called
    book        what one run is at, from its small files: metrics, certificate, alarms, state
    log_thread  the episode log of one run, in a thread of its own
    episodes    an episode as the page wants it, with what became of its tokens; `texts` makes text of these
    app         who may ask, and who answers; `page` the built page
    serving     the socket, the address, the server
    export      one run as one page

Invariant: nothing in a run folder is written but the log's index, which is derived; what a request names is looked up,
and never made part of a path.
"""
