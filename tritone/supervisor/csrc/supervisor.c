/* What the supervisor tells, and what tritonserver therefore answers when it is asked whether it is ready. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "guard.h"
#include "real.h"

#define LINE 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char unready[LINE];
static volatile bool draining;

bool is_draining(void) { return draining; }

static void obey(char *line) {
  if (strncmp(line, "dead ", 5) == 0) {
    end_model(line + 5);
  } else if (strncmp(line, "load ", 5) == 0) {
    char *answer = strchr(line + 5, ' ');
    if (answer == NULL) return;
    *answer = '\0';
    load_model(line + 5, answer + 1);
  } else if (strncmp(line, "unready", 7) == 0) {
    pthread_mutex_lock(&lock);
    snprintf(unready, sizeof unready, "%s ", line + 7);
    pthread_mutex_unlock(&lock);
  } else if (strcmp(line, "drain") == 0) {
    draining = true;
  }
}

static void *listen_to_supervisor(void *path) {
  /* For writing too: it never ends when the supervisor's end is closed. */
  int pipe = open(path, O_RDWR | O_CLOEXEC);
  char text[LINE];
  size_t held = 0;
  while (pipe >= 0) {
    struct pollfd watched = {pipe, POLLIN, 0};
    if (poll(&watched, 1, 500) > 0) {
      ssize_t got = read(pipe, text + held, sizeof text - 1 - held);
      if (got <= 0) break;
      held += (size_t)got;
      text[held] = '\0';
      char *line = text;
      for (char *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = '\0';
        obey(line);
      }
      held = strlen(line);
      memmove(text, line, held);
      if (held == sizeof text - 1) held = 0;
    }
    sweep();
  }
  return NULL;
}

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("TRITONE_GUARD");
  const char *other = getenv("TRITONE_PRELOAD");
  if (path == NULL) return;
  /* The stages' processes are started with this environment; they need no guard. */
  if (other != NULL && *other != '\0') {
    setenv("LD_PRELOAD", other, 1);
  } else {
    unsetenv("LD_PRELOAD");
  }
  char *copy = strdup(path);
  unsetenv("TRITONE_GUARD");
  pthread_t thread;
  if (pthread_create(&thread, NULL, listen_to_supervisor, copy) == 0) pthread_detach(thread);
}

/* -- what tritonserver asks -- */

static bool is_unready(const char *name) {
  char word[128];
  snprintf(word, sizeof word, " %s ", name);
  pthread_mutex_lock(&lock);
  bool found = strstr(unready, word) != NULL;
  pthread_mutex_unlock(&lock);
  return found;
}

EXPORT TRITONSERVER_Error *TRITONSERVER_ServerIsReady(TRITONSERVER_Server *server, bool *ready) {
  NEXT(TRITONSERVER_ServerIsReady, Error, TRITONSERVER_Server *, bool *);
  Error error = next_TRITONSERVER_ServerIsReady(server, ready);
  if (error == NULL && (draining || strlen(unready) > 1)) *ready = false;
  return error;
}

EXPORT TRITONSERVER_Error *TRITONSERVER_ServerModelIsReady(TRITONSERVER_Server *server, const char *name,
                                                           const int64_t version, bool *ready) {
  NEXT(TRITONSERVER_ServerModelIsReady, Error, TRITONSERVER_Server *, const char *, const int64_t, bool *);
  Error error = next_TRITONSERVER_ServerModelIsReady(server, name, version, ready);
  if (error == NULL && is_unready(name)) *ready = false;
  return error;
}
