"""Which event means what in which state.

Theory of operation
-------------------
A request is in one state at a time, and a state is what we wait for:

- for the control plane: COUNTING the prompt, QUEUED for admission, ROUTING to a worker, WAITING for
  one, BACKING OFF before the next try, LOCATING the request at the state daemon that stored it;
- for a worker: CONNECTING, AWAITING FIRST (the first token), then STREAMING, COLLECTING (an answer
  in one piece), or REGENERATING (it repeats what the client has, which is compared and dropped);
  DECLINING while it says why it will not; ATTACHING to a stream that runs there already;
- for the client: DELIVERING its last bytes, DETACHED while it is absent, ADOPTING its stream from
  another replica; HANDING OVER an absent client's stream from one worker to another.

Three rules hold everything together.

1. *One end.* After `Accept` there is exactly one `RecordEnd` or `LetGo`, whichever of client,
   worker and control plane goes first. Only `endings` emits them, and both lead to ENDED, from
   which nothing leads away.
2. *One attempt.* An `Attempt` state holds the one worker that may have the request. A transition
   from such a state to one without an attempt, or to another attempt, emits `Close` first. An
   attempt that runs on for an absent client is `left` in a state without an attempt, and is
   attached to, released, or dropped, never joined by a second one.
3. *A prefix.* Bytes go to the client in whole frames, together with the ids that they show. The
   next attempt begins at the first token whose frame did not come; what it repeats is dropped.
   So what a client has is a prefix of the one true stream, at every moment.

A client's presence is a second, smaller state: `Stream.absent_until`. A client that has shown a
resume token may leave and return in any state that holds a begun answer. It may also return before
its old connection is known to be dead: the newest connection wins.

Whatever is lost while the client is present is lost *in place*: the handlers of `attempts` close
the attempt, record the failure, and `placing.proceed` goes to ROUTING, or says why it cannot.

The hot path does not come here: in STREAMING, `state.take(chunk, now)` turns one chunk of the
worker's into one chunk of the client's. What it does not take comes as `Data`, is cut into frames,
and each frame is looked up here like any other event.

An event that is in no row of its state raises `IllegalEvent`: a shell that feeds one has a bug.

Where each event leads is in docs/reference/stream-states.md; tests/stream/test_stories.py tells six lives
of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from relume.controlplane.stream.arrival import Rejected
from relume.controlplane.stream.handlers import (
    answering,
    attempts,
    endings,
    placing,
    relayed,
    resuming,
)
from relume.controlplane.stream.stream_data import Stream

Handler = Callable[[Stream, Any, Any, float], s.State]
Row = dict[type, Handler]

# What may happen in any state but ENDED.
ANYWHERE: Row = {
    e.Fault: endings.on_fault,
    e.ShutDown: endings.on_shutdown,
    e.TakenOver: endings.on_taken_over,
}
# A client that is there may leave.
CLIENT: Row = {**ANYWHERE, e.ClientGone: resuming.on_client_gone}
# One that can resume may also return on a new connection, before the old one is known to be lost.
PRESENT: Row = {**CLIENT, e.ClientReturned: resuming.on_client_returned}
# An absent one may return, or stay away for too long.
ABSENT: Row = {
    **ANYWHERE,
    e.ClientReturned: resuming.on_client_returned,
    e.GraceOver: resuming.on_grace_over,
}
# Where both may be: a stream whose engine is lost is placed again whether its client is there or
# not.
EITHER: Row = {**PRESENT, **ABSENT}
# A worker that has the request may be lost, as its connection or another observer says.
LOSABLE: Row = {
    e.ConnectionLost: attempts.on_connection_lost,
    e.EngineGivenUp: attempts.on_engine_given_up,
    e.TokensDoubted: attempts.on_tokens_doubted,
}
# Frames come, and at last the response ends, which it should not do before the end frame.
FRAMES: Row = {
    **PRESENT,
    **LOSABLE,
    e.Data: answering.on_data,
    e.ResponseEnded: attempts.on_frames_end,
    **answering.FRAME_HANDLERS,
}

TABLE: dict[type[s.State], Row] = {
    s.Counting: {
        **CLIENT,
        e.Counted: placing.on_counted,
        e.Accepted: placing.on_accepted,
        e.NotAccepted: placing.on_not_accepted,
        e.Adopted: resuming.on_adopted,
    },
    s.Queued: {
        **CLIENT,
        e.Admitted: placing.on_admitted,
        e.Enqueued: placing.on_enqueued,
        e.Called: placing.on_called,
        Rejected: endings.on_rejected,
    },
    # ROUTING and LOCATING are answered at once: nothing else can come between.
    s.Routing: {
        **ANYWHERE,
        e.Assigned: placing.on_assigned,
        e.NoWorker: placing.on_no_worker,
        Rejected: endings.on_rejected,
    },
    s.Locating: {**ANYWHERE, e.EnvelopeKnown: placing.on_envelope_known},
    s.Waiting: {
        **EITHER,
        e.CapacityKnown: placing.on_capacity,
        e.TimerFired: placing.on_wait_timer,
    },
    s.BackingOff: {
        **EITHER,
        e.TimerFired: placing.on_retry_timer,
        e.EngineGivenUp: attempts.on_plan_given_up,
        e.TokensDoubted: attempts.on_plan_doubted,
    },
    s.Connecting: {
        **EITHER,
        e.Connected: attempts.on_connected,
        e.ConnectFailed: attempts.on_connect_failed,
        e.EngineGivenUp: attempts.on_engine_given_up,
        e.TokensDoubted: attempts.on_tokens_doubted,
    },
    s.AwaitingFirst: {**FRAMES, e.Head: attempts.on_head},
    s.Attaching: {**FRAMES, e.Head: attempts.on_attach_head},
    s.Regenerating: FRAMES,
    s.Collecting: FRAMES,
    s.Streaming: FRAMES,
    s.HandingOver: {
        **ABSENT,
        **LOSABLE,
        e.Head: attempts.on_head,
        e.HandoverNoticed: resuming.on_handover_noticed,
    },
    s.Declining: {
        **EITHER,
        **LOSABLE,
        e.Data: attempts.on_declining_data,
        e.ResponseEnded: attempts.on_declined,
    },
    s.AwaitingRelayed: {**CLIENT, **LOSABLE, e.Head: relayed.on_relayed_head},
    s.Relaying: {
        **CLIENT,
        **LOSABLE,
        e.Data: relayed.on_relayed_data,
        e.ResponseEnded: relayed.on_relayed_end,
    },
    s.Adopting: {**EITHER, e.Owned: resuming.on_owned},
    s.Detached: {
        **ABSENT,
        e.HandoverNoticed: resuming.on_handover_noticed,
        e.EngineGivenUp: resuming.on_unattended_given_up,
        e.TokensDoubted: resuming.on_unattended_doubted,
    },
    s.Delivering: {**PRESENT, e.Delivered: resuming.on_delivered},
    # The first of these ends it; the others may come a moment later.
    s.Ended: dict.fromkeys(
        (e.ClientGone, e.Fault, e.ShutDown, e.TakenOver, e.Owned, e.Delivered), endings.ignore
    ),
}
