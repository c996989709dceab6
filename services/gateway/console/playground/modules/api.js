// The gateway's routes, with the key if there is one, and its errors as one class.

const KEY = "penstock-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: value => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, {message, code, param, n_prompt_tokens: numPrompt, n_ctx: numContext} = {}) {
    super(message ?? `the server answered with ${status}`);
    this.status = status;
    this.code = code;
    this.param = param;
    this.numPrompt = numPrompt; // of a prompt that is longer than the model's window
    this.numContext = numContext;
  }
}

// The response to a request. Throws ApiError for an error status, TypeError if nobody answers.
export async function call(path, {method = "GET", body, headers = {}, signal} = {}) {
  const authorization = key.get() ? {Authorization: `Bearer ${key.get()}`} : {};
  const type = body === undefined ? {} : {"Content-Type": "application/json"};
  const reply = await fetch(path, {
    method, signal, cache: "no-store",
    headers: {...authorization, ...type, ...headers},
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!reply.ok) throw new ApiError(reply.status, await errorIn(reply));
  return reply;
}

async function errorIn(reply) {
  try {
    return (await reply.json()).error;
  } catch {
    return undefined;
  }
}

export async function listModels() {
  const {data} = await (await call("/v1/models")).json();
  return data;
}
