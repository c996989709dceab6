// Server-sent events of a fetch: unlike EventSource, it may have headers, a method and a body.

// Yields {id, data} for each event of a response's body.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", id = null, data = [];
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield {id, data: data.join("\n")};
          id = null;
          data = [];
        } else if (line.startsWith("data: ")) data.push(line.slice(6));
        else if (line.startsWith("id: ")) id = line.slice(4);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
