// The moment that is shown, and how changes are applied to it.

const NAMES = { lanes: "name", replicas: "name", models: "model", requests: "request", incidents: "id" };

export class Moment {
  constructor(data) {
    this.head = data.head;
    for (const [part, key] of Object.entries(NAMES)) this[part] = new Map(data[part].map((row) => [row[key], row]));
  }

  /** Take the changes since. A row that is new comes last. */
  apply(data) {
    this.head = data.head;
    for (const [part, key] of Object.entries(NAMES)) {
      for (const name of data.gone[part] ?? []) this[part].delete(name);
      for (const row of data[part]) this[part].set(row[key], row);
    }
  }
}
