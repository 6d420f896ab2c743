/* Finding and killing processes of one sandbox by descent, seen through its own /proc.
 *
 * Killing a process group is not enough: setsid and double forks leave it. Every command is started as a subreaper,
 * so whatever it starts stays below it while it lives; here that tree is stopped, then killed, the root last.
 */
#include "helper.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct process {
    pid_t pid, parent;
    char state;
    bool chosen;
};

static struct process *table;
static size_t table_size, table_capacity;

/* Reads pid, state and parent from /proc/PID/stat; the name in between may hold anything, so search its last ')'. */
static bool read_process(int proc_fd, const char *name, struct process *process) {
    char path[32], text[512];
    snprintf(path, sizeof path, "%.10s/stat", name);
    int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return false;
    text[size] = 0;
    char *after = strrchr(text, ')');
    if (!after)
        return false;
    process->pid = atoi(name);
    process->chosen = false;
    return sscanf(after + 1, " %c %d", &process->state, &process->parent) == 2;
}

static void read_table(int proc_fd) {
    table_size = 0;
    int fd = openat(proc_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory)
        return;
    for (struct dirent *found; (found = readdir(directory));) {
        if (found->d_name[0] < '1' || found->d_name[0] > '9')
            continue;
        if (table_size == table_capacity) {
            size_t capacity = table_capacity ? 2 * table_capacity : 256;
            struct process *larger = realloc(table, capacity * sizeof *table);
            if (!larger)
                break;
            table = larger;
            table_capacity = capacity;
        }
        if (read_process(proc_fd, found->d_name, &table[table_size]))
            table_size++;
    }
    closedir(directory);
}

static const struct process *find(pid_t pid) {
    size_t low = 0, high = table_size; /* /proc lists its processes by ascending number */
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table[middle].pid == pid)
            return &table[middle];
        if (table[middle].pid < pid)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static bool descends(const struct process *process, pid_t root) {
    for (size_t steps = 0; process && steps < table_size; steps++) {
        if (process->parent == root)
            return true;
        process = find(process->parent);
    }
    return false;
}

static void choose(int scope, pid_t main, const pid_t *spared, int spared_count) {
    for (size_t i = 0; i < table_size; i++) {
        struct process *process = &table[i];
        if (scope != KILL_LEFTOVERS) { /* the root goes last, so that orphans stay below it */
            process->chosen = descends(process, main);
            continue;
        }
        process->chosen = process->pid != 1;
        for (int j = 0; j < spared_count && process->chosen; j++)
            process->chosen = process->pid != spared[j] && !descends(process, spared[j]);
    }
}

/* Signals what is chosen and alive; returns how many were not yet in the state that the signal leads to. */
static size_t signal_chosen(int number) {
    size_t waiting = 0;
    for (size_t i = 0; i < table_size; i++)
        if (table[i].chosen && table[i].state != 'Z' && table[i].state != 'X') {
            kill(table[i].pid, number);
            waiting += !(number == SIGSTOP && table[i].state == 'T');
        }
    return waiting;
}

static void signal_until_settled(int proc_fd, int scope, pid_t main, const pid_t *spared, int count, int number) {
    for (int round = 0; round < 1000; round++) {
        read_table(proc_fd);
        choose(scope, main, spared, count);
        if (!signal_chosen(number))
            return;
        usleep(200);
    }
}

void kill_processes(int proc_fd, int scope, pid_t main, const pid_t *spared, int spared_count, int signal_number) {
    if (scope == KILL_MAIN || scope == KILL_ALL) {
        kill(scope == KILL_ALL ? -1 : main, signal_number);
        return;
    }
    if (scope == KILL_TREE)
        kill(main, SIGSTOP);
    signal_until_settled(proc_fd, scope, main, spared, spared_count, SIGSTOP); /* what is stopped can't fork */
    signal_until_settled(proc_fd, scope, main, spared, spared_count, SIGKILL);
    if (scope == KILL_TREE)
        kill(main, SIGKILL);
}
