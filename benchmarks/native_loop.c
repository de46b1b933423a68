/* The machine's limit: worlds [low, high) of a batch, in turn, tick by tick, with nothing beside MuJoCo's own step.

   `ctrl` is (ticks, num_worlds, model->nu). After tick t, world i starts again from the state in row begins[t][i] of
   `starts`, where that is not negative: so the episodes played are those of the program that recorded them. */
#include <mujoco/mujoco.h>

void play(const mjModel* model, mjData* const* data, const mjtNum* ctrl, const int* begins, const mjtNum* starts,
          int signature, int num_worlds, int low, int high, int ticks, int frame_skip) {
  const int state_size = mj_stateSize(model, signature);
  for (int t = 0; t < ticks; t++) {
    for (int i = low; i < high; i++) {
      const int place = t * num_worlds + i;
      mju_copy(data[i]->ctrl, ctrl + (long)place * model->nu, model->nu);
      for (int k = 0; k < frame_skip; k++) mj_step(model, data[i]);
      if (begins[place] >= 0) mj_setState(model, data[i], starts + (long)begins[place] * state_size, signature);
    }
  }
}
