// Which model the router serves: asked for once, and again where the router serves it no more.

import { getJson } from "./api.js";

export class Served {
  #name = null;
  #changed; // told of a model that was not known

  constructor(changed) {
    this.#changed = changed;
  }

  /** What questions have to call the model. */
  async name() {
    if (this.#name === null) {
      const listed = (await getJson("v1/models")).data[0];
      this.#name = listed.id;
      this.#changed(listed);
    }
    return this.#name;
  }

  /** The events that `ask` has for the model's name: of another one, where a page outlived the model it knew. */
  async *events(ask) {
    const name = await this.name();
    try {
      return yield* ask(name);
    } catch (error) {
      if (error.status !== 404) throw error;
      this.#name = null;
      if ((await this.name()) === name) throw error;
    }
    yield* ask(await this.name());
  }
}
