/* Loads a stage again, in a thread of its own.

   Over HTTP a load would hold one of tritonserver's few HTTP threads for seconds, and with it every connection that this
   thread serves: probes of liveness and streams of other requests would stand still until the stage is back. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "guard.h"
#include "real.h"

#define ANSWER 4096

typedef struct Load {
  TRITONSERVER_Server *server;
  char *model, *answer;
} Load;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t loaded = PTHREAD_COND_INITIALIZER;
static TRITONSERVER_Server *server; /* null before it has started and from its end on */
static int loading;

/* One message that ends with a zero byte; empty for success. Nobody reads it once the supervisor has given up. */
static void say(const char *path, const char *message) {
  int pipe = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
  if (pipe < 0) return;
  char answer[ANSWER];
  snprintf(answer, sizeof answer, "%s", message);
  if (write(pipe, answer, strlen(answer) + 1) < 0) fprintf(stderr, "tritone guard: no answer to a load\n");
  close(pipe);
}

static void *run(void *argument) {
  NEXT(TRITONSERVER_ServerLoadModel, Error, TRITONSERVER_Server *, const char *);
  NEXT(TRITONSERVER_ErrorMessage, const char *, Error);
  Load *load = argument;
  Error error = next_TRITONSERVER_ServerLoadModel(load->server, load->model);
  say(load->answer, error == NULL ? "" : next_TRITONSERVER_ErrorMessage(error));
  error_delete(error);
  free(load->model);
  free(load->answer);
  free(load);
  pthread_mutex_lock(&lock);
  loading--;
  pthread_cond_broadcast(&loaded);
  pthread_mutex_unlock(&lock);
  return NULL;
}

void load_model(const char *model, const char *answer) {
  pthread_mutex_lock(&lock);
  TRITONSERVER_Server *used = server;
  if (used != NULL) loading++;
  pthread_mutex_unlock(&lock);
  if (used == NULL) {
    say(answer, "the server has not started, or is ending");
    return;
  }
  Load *load = malloc(sizeof *load);
  *load = (Load){used, strdup(model), strdup(answer)};
  pthread_t thread;
  if (pthread_create(&thread, NULL, run, load) == 0) {
    pthread_detach(thread);
  } else {
    run(load);
  }
}

/* -- what tritonserver calls -- */

EXPORT TRITONSERVER_Error *TRITONSERVER_ServerNew(TRITONSERVER_Server **made, TRITONSERVER_ServerOptions *options) {
  NEXT(TRITONSERVER_ServerNew, Error, TRITONSERVER_Server **, TRITONSERVER_ServerOptions *);
  Error error = next_TRITONSERVER_ServerNew(made, options);
  pthread_mutex_lock(&lock);
  if (error == NULL) server = *made;
  pthread_mutex_unlock(&lock);
  return error;
}

EXPORT TRITONSERVER_Error *TRITONSERVER_ServerDelete(TRITONSERVER_Server *old) {
  NEXT(TRITONSERVER_ServerDelete, Error, TRITONSERVER_Server *);
  pthread_mutex_lock(&lock);
  TRITONSERVER_Server *used = server;
  if (used == old) server = NULL;
  /* A load that has begun still uses it. */
  while (used == old && loading > 0) pthread_cond_wait(&loaded, &lock);
  pthread_mutex_unlock(&lock);
  return next_TRITONSERVER_ServerDelete(old);
}
