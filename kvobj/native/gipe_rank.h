/* Counts of intervals by class and age, and the Gittins index made of them (eviction.md, section 3). Pure. */
#ifndef KVOBJ_GIPE_RANK_H
#define KVOBJ_GIPE_RANK_H

#include "gipe.h"
#include <string.h>

#define COUNT_MAX (UINT32_C(1) << 31)

static void rank_refresh(rank_t *rank);

static void rank_open(rank_t *rank, const uint64_t bound[POINTERS], double prior_weight, double prior_rate) {
    memset(rank, 0, sizeof *rank);
    rank->prior_weight = prior_weight;
    rank->prior_rate = prior_rate;
    for (int j = 0; j < POINTERS; j++) rank->width[j] = (double)(bound[j] - (j ? bound[j - 1] : 0));
    rank->width[BUCKETS - 1] = 2.0 * (double)bound[POINTERS - 1];
    rank_refresh(rank);
}

static void halve(rank_t *rank) {
    for (int c = 0; c < CLASSES; c++)
        for (int j = 0; j < BUCKETS; j++) {
            rank->entered[c][j] >>= 1;
            rank->ended[c][j] >>= 1;
        }
}

static void rank_entered(rank_t *rank, int class_, int bucket) {
    if (++rank->entered[class_][bucket] == COUNT_MAX) halve(rank);
}

static void rank_ended(rank_t *rank, int class_, int bucket) {
    if (++rank->ended[class_][bucket] == COUNT_MAX) halve(rank);
}

/* The best attainable rate over all horizons, from the last bucket back: a stretch takes in the best stretch behind it for as long as
 * that one has the higher rate. */
static void make_worth(const rank_t *rank, double *worth, int uses, const uint32_t *entered, const uint32_t *ended) {
    struct { double reward, cost, survival, rate; } stack[BUCKETS];
    int top = 0;
    double k = rank->prior_weight;
    const double *use = rank->by_uses[uses];
    for (int j = BUCKETS - 1; j >= 0; j--) {
        double p = ((double)ended[j] + k * use[j]) / ((double)entered[j] + k);
        if (p > 0.999) p = 0.999;
        double reward = p, cost = rank->width[j] * (1.0 - p / 2.0), survival = 1.0 - p;
        double rate = reward / cost;
        while (top && stack[top - 1].rate > rate) {
            top--;
            reward += survival * stack[top].reward;
            cost += survival * stack[top].cost;
            survival *= stack[top].survival;
            rate = reward / cost;
        }
        worth[j] = rate;
        stack[top].reward = reward;
        stack[top].cost = cost;
        stack[top].survival = survival;
        stack[top].rate = rate;
        top++;
    }
}

static void rank_refresh(rank_t *rank) {
    uint64_t entered[USES][BUCKETS] = {{0}}, ended[USES][BUCKETS] = {{0}};
    for (int c = 0; c < CLASSES; c++) {
        int uses = c % USES;
        for (int j = 0; j < BUCKETS; j++) {
            entered[uses][j] += rank->entered[c][j];
            ended[uses][j] += rank->ended[c][j];
        }
    }
    double k = rank->prior_weight;
    for (int j = 0; j < BUCKETS; j++) {
        uint64_t all_entered = 0, all_ended = 0;
        for (int f = 0; f < USES; f++) {
            all_entered += entered[f][j];
            all_ended += ended[f][j];
        }
        rank->pool[j] = ((double)all_ended + k * rank->prior_rate) / ((double)all_entered + k);
        for (int f = 0; f < USES; f++)
            rank->by_uses[f][j] = ((double)ended[f][j] + k * rank->pool[j]) / ((double)entered[f][j] + k);
    }
    static const uint32_t none[BUCKETS];
    for (int f = 0; f < USES; f++) make_worth(rank, rank->worth[CLASSES + f], f, none, none);
    for (int c = 0; c < CLASSES; c++) { /* most classes never have a member */
        rank->row[c] = (uint16_t)(rank->entered[c][0] ? c : CLASSES + c % USES);
        if (rank->entered[c][0]) make_worth(rank, rank->worth[c], c % USES, rank->entered[c], rank->ended[c]);
    }
}

#endif
