// Chats in IndexedDB: they stay in this browser. Where it has none (some private windows), they live as long as the page.

const NAME = "penstock-playground", STORE = "chats";

function asked(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export class ChatStore {
  static async open() {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, {keyPath: "id"});
      return new ChatStore(await asked(request));
    } catch {
      return new ChatStore(null);
    }
  }

  constructor(database) {
    this.database = database;
  }

  get isLasting() {
    return this.database !== null;
  }

  // All chats, the one that was changed last first.
  async all() {
    const chats = this.database ? await asked(this.#chats("readonly").getAll()) : [];
    return chats.sort((a, b) => b.changedAt - a.changedAt);
  }

  async put(chat) {
    if (this.database) await asked(this.#chats("readwrite").put(chat));
  }

  async remove(id) {
    if (this.database) await asked(this.#chats("readwrite").delete(id));
  }

  #chats(mode) {
    return this.database.transaction(STORE, mode).objectStore(STORE);
  }
}
