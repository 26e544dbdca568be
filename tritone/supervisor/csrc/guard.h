/* What the guard's parts know of each other. */
#ifndef TRITONE_GUARD_H
#define TRITONE_GUARD_H

#include "triton.h"

/* A model instance and the stage process behind it. */
typedef struct Instance {
  struct Instance *next;
  TRITONBACKEND_ModelInstance *handle;
  char model[64];
  bool dead; /* Its process has ended; set once, under the lock. */
} Instance;

/* One request that a stage was given: what its answer needs, and how far the answer is. All under the lock. */
typedef struct Call {
  struct Call *next;
  Instance *instance;
  TRITONBACKEND_Request *request;         /* valid while `executing` */
  TRITONBACKEND_ResponseFactory *factory; /* null for a plain (not decoupled) stage */
  uint64_t session;
  char *request_body, *handoff, *event; /* copies of the inputs; null where the stage has no such input */
  int sent;                             /* responses that left */
  int sending;                          /* threads inside a send */
  bool executing, finished, forced;     /* forced: ended by the guard; what the stage's side still does is swallowed */
  double forced_at;
} Call;

/* answers.c: ends `call` in its dead stage's place; `emit` and `flags` below do the sending. */
void answer_call(Call *call);

/* guard.c: a response of `call`; null `error` for one with outputs. Gives null when Triton refuses. */
TRITONBACKEND_Response *new_response(Call *call);
void send_response(Call *call, TRITONBACKEND_Response *response, bool last, TRITONSERVER_Error *error);
void send_last_flag(Call *call);

/* real.c: an error with Triton's code; an output of a response, false when Triton refuses. */
TRITONSERVER_Error *unavailable(const char *message);
bool add_output(TRITONBACKEND_Response *response, const char *name, int type, const int64_t *shape, int rank,
                const void *data, uint64_t size);

/* guard.c, for what the supervisor tells: `model`'s process has died; delete the factories of calls that were ended, which
   hold the model, which could not be unloaded. */
void end_model(const char *model);
void sweep(void);

/* loads.c: loads `model` again in a thread of its own; Triton's message, empty for success, goes into the pipe `answer`. */
void load_model(const char *model, const char *answer);

/* supervisor.c: whether new requests are refused. */
bool is_draining(void);

/* board.c: the cancel board of the run directory. `cancel` posts a failure: the client still listens, for its error. */
bool is_cancelled(uint64_t session);
void cancel(uint64_t session);

#endif
