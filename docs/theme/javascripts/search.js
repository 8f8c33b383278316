// Material's search appends a wildcard to every word, so "a" in "resume a run" matches every word that starts with a.
// Remove such words, and the package's name, from what it sends to its worker (messages of type 2).
const IGNORED = /(?:^|(?<=\s))(?:an?|and|are|can|do|does|for|from|how|i|in|is|it|my|of|on|or|the|to|what|with|astuner)(?:\s+|$)/gi;
const post = Worker.prototype.postMessage;

Worker.prototype.postMessage = function (message, ...rest) {
  if (message?.type === 2 && typeof message.data === "string") {
    const words = message.data.replace(/\bastuner\./g, "").replace(IGNORED, "").trim();
    message = { ...message, data: words || message.data };
  }
  return post.call(this, message, ...rest);
};
