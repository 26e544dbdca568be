/* What a request gets in place of the answer of a stage whose process has ended.

   Everything stays in the stream: an error sent by a step after streaming began would leave the ensemble's request in
   Triton for ever. So prefill and integrity hand on a failure, decode an error event, Talker and VoiceBox pass text on
   without speech and mark it, postprocess gives the client its error event. Only preprocess, before all streaming,
   refuses with a Triton error. The messages are those of tritone/messages/, whose JSON is compact and begins with the
   kind. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"

#define REASON "%s: the process of this stage has ended and is being started again; try again in a few seconds"

static bool begins(const char *text, const char *start) { return strncmp(text, start, strlen(start)) == 0; }

static bool add_string(TRITONBACKEND_Response *response, const char *name, const char *text) {
  uint32_t size = (uint32_t)strlen(text);
  char *data = malloc(size + sizeof size);
  memcpy(data, &size, sizeof size);
  memcpy(data + sizeof size, text, size);
  const int64_t shape[] = {1};
  bool added = add_output(response, name, TYPE_BYTES, shape, 1, data, size + sizeof size);
  free(data);
  return added;
}

static bool add_session(TRITONBACKEND_Response *response, uint64_t session) {
  const int64_t shape[] = {1};
  return add_output(response, "session", TYPE_UINT64, shape, 1, &session, sizeof session);
}

static void send_event(Call *call, const char *event, bool last) {
  TRITONBACKEND_Response *response = new_response(call);
  if (response == NULL) return;
  add_session(response, call->session);
  add_string(response, "event", event);
  send_response(call, response, last, NULL);
}

static void send_error_event(Call *call) {
  char event[512];
  snprintf(event, sizeof event,
           "{\"kind\":\"error\",\"info\":{\"finish_reason\":\"error\",\"code\":\"UNAVAILABLE\",\"message\":\"" REASON "\"}}",
           call->instance->model);
  cancel(call->session);
  send_event(call, event, true);
}

static void send_start_event(Call *call, const char *info) {
  char *event = NULL;
  if (asprintf(&event, "{\"kind\":\"start\",\"info\":%s", info) >= 0) send_event(call, event, false);
  free(event);
}

/* prefill, integrity: a failure in place of the hand-over; beats, and failures of earlier stages, pass. */
static void answer_prefilled(Call *call) {
  char failure[512];
  const char *handoff = call->handoff;
  if (handoff == NULL || begins(handoff, "{\"handoff\":{")) {
    snprintf(failure, sizeof failure,
             "{\"handoff\":null,\"failure\":{\"kind\":\"error\",\"code\":\"UNAVAILABLE\",\"message\":\"" REASON "\"}}",
             call->instance->model);
    handoff = failure;
    cancel(call->session);
  }
  TRITONBACKEND_Response *response = new_response(call);
  if (response == NULL) return;
  const int64_t none[] = {0};
  add_session(response, call->session);
  add_output(response, "ids", TYPE_INT32, none, 1, NULL, 0);
  add_string(response, "request", call->request_body);
  add_string(response, "handoff", handoff);
  send_response(call, response, true, NULL);
}

static void answer_decode(Call *call) {
  bool known = *call->request_body != '\0';
  /* Later stages know only sessions that started. `info` is the request itself: its options, and when it came. */
  if (known && call->sent == 0) {
    char *info = NULL;
    if (asprintf(&info, "%s}", call->request_body) >= 0) send_start_event(call, info);
    free(info);
  }
  if (!known || begins(call->handoff, "{\"handoff\":null,\"failure\":null")) {
    send_event(call, "{\"kind\":\"beat\"}", true);
  } else {
    send_error_event(call);
  }
}

/* talker, voicebox: text goes on, marked as without speech from here on. */
static void answer_speech(Call *call) {
  const char *event = call->event;
  if (begins(event, "{\"kind\":\"speak\"")) {
    const char *info = strstr(event, ",\"info\":");
    if (call->sent == 0 && info != NULL) send_start_event(call, info + strlen(",\"info\":"));
    send_error_event(call);
    return;
  }
  bool terminal = begins(event, "{\"kind\":\"end\"") || begins(event, "{\"kind\":\"error\"") ||
                  begins(event, "{\"kind\":\"cancelled\"");
  bool owed = call->sent == 0 && (begins(event, "{\"kind\":\"text\"") || begins(event, "{\"kind\":\"start\""));
  char *marked = NULL;
  int made = terminal || owed ? asprintf(&marked, "%.*s,\"lost\":\"%s\"}", (int)strlen(event) - 1, event, call->instance->model)
                              : asprintf(&marked, "{\"kind\":\"beat\",\"lost\":\"%s\"}", call->instance->model);
  if (made >= 0) send_event(call, marked, true);
  free(marked);
}

/* postprocess: the client's own error, once; what else comes for the session says nothing. */
static void answer_client(Call *call) {
  if (is_cancelled(call->session)) {
    send_last_flag(call);
    return;
  }
  cancel(call->session);
  TRITONBACKEND_Response *response = new_response(call);
  if (response == NULL) return;
  char info[512];
  snprintf(info, sizeof info, "{\"finish_reason\":\"error\",\"code\":\"UNAVAILABLE\",\"message\":\"" REASON "\"}",
           call->instance->model);
  const int32_t unknown = -1;
  const int64_t shape[] = {1};
  add_output(response, "index", TYPE_INT32, shape, 1, &unknown, sizeof unknown);
  add_string(response, "event", "error");
  add_string(response, "info", info);
  send_response(call, response, true, NULL);
}

void answer_call(Call *call) {
  const char *model = call->instance->model;
  if (call->request_body != NULL && (strcmp(model, "prefill") == 0 || strcmp(model, "integrity") == 0)) {
    answer_prefilled(call);
  } else if (call->request_body != NULL && call->handoff != NULL && strcmp(model, "decode") == 0) {
    answer_decode(call);
  } else if (call->event != NULL && (strcmp(model, "talker") == 0 || strcmp(model, "voicebox") == 0)) {
    answer_speech(call);
  } else if (call->event != NULL && strcmp(model, "postprocess") == 0) {
    answer_client(call);
  } else {
    char message[256];
    snprintf(message, sizeof message, "UNAVAILABLE: " REASON, model);
    TRITONBACKEND_Response *response = new_response(call);
    if (response != NULL) send_response(call, response, true, unavailable(message));
  }
  /* Triton refused one of the responses above: the request still has to end. */
  if (!call->finished) send_last_flag(call);
}
