// Runs llama.vscode's own completion code in Node, with as much of the `vscode` module as it touches, and types in a file.
// node vscode_driver.cjs <checkout> <settings.json> <port>; the answer is one JSON object on standard output.
const fs = require("fs"), os = require("os"), path = require("path"), Module = require("module");
const [checkout, settings, port] = process.argv.slice(2);

const defaults = {};
const contributed = JSON.parse(fs.readFileSync(path.join(checkout, "package.json"))).contributes.configuration;
for (const part of [].concat(contributed))
  for (const [name, field] of Object.entries(part.properties)) defaults[name] = field.default;
const chosen = JSON.parse(fs.readFileSync(settings));
for (const [name, value] of Object.entries(chosen)) {
  if (!(name in defaults)) throw new Error(`llama.vscode has no setting ${name}`);
  defaults[name] = typeof value === "string" ? value.replace(":8012", ":" + port) : value;
}

class Position { constructor(line, character) { Object.assign(this, { line, character }); } }
class Range { constructor(start, end) { Object.assign(this, { start, end }); } }
class InlineCompletionItem { constructor(insertText, range) { Object.assign(this, { insertText, range }); } }
const messages = [];
const say = (message) => { messages.push(message); return Promise.resolve(undefined); };
const bar = { text: "", show() {} };
const vscode = {
  Position, Range, InlineCompletionItem,
  InlineCompletionTriggerKind: { Invoke: 0, Automatic: 1 }, StatusBarAlignment: { Left: 1, Right: 2 },
  window: {
    createStatusBarItem: () => bar, createOutputChannel: () => ({ appendLine() {}, show() {} }),
    showInformationMessage: say, showErrorMessage: say, showWarningMessage: say,
  },
  workspace: { getConfiguration: (section) => ({ get: (name) => defaults[`${section}.${name}`] }) },
  env: { language: "en" },
};
vscode.default = vscode;
const load = Module._load;
Module._load = (name, ...rest) => (name === "vscode" ? vscode : load(name, ...rest));

const names = ["completion", "configuration", "extra-context", "llama-server", "logger", "lru-cache", "statusbar"];
const bundle = path.join(fs.mkdtempSync(path.join(os.tmpdir(), "llama-vscode-")), "bundle.cjs");
require(path.join(checkout, "node_modules", "esbuild")).buildSync({
  stdin: { contents: names.map((name) => `export * from "./${name}";`).join("\n"), resolveDir: path.join(checkout, "src") },
  bundle: true, platform: "node", format: "cjs", external: ["vscode"], outfile: bundle, logLevel: "error",
});
const client = require(bundle);
fs.rmSync(path.dirname(bundle), { recursive: true });

const app = { getComplModel: () => ({}), modelService: {}, dialogs: {}, menu: {} };
app.configuration = new client.Configuration();
app.lruResultCache = new client.LRUCache(app.configuration.max_cache_keys);
app.logger = new client.Logger(app);
app.statusbar = new client.Statusbar(app);
app.extraContext = new client.ExtraContext(app);
app.llamaServer = new client.LlamaServer(app);
app.completion = new client.Completion(app);

const document = (name, text) => {
  const lines = text.split("\n");
  const lineAt = (n) => ({ text: lines[n] });
  return { fileName: name, languageId: "python", isDirty: false, lineCount: lines.length, lineAt, getText: () => text };
};
const settle = async (condition) => {
  for (let i = 0; i < 400 && !condition(); i++) await new Promise((done) => setTimeout(done, 10));
  if (!condition()) throw new Error("did not happen: " + condition);
};

(async () => {
  const helper = Array.from({ length: 40 }, (_, i) => `def compute_total_${i}(items):\n    return sum(items) * ${i}\n`).join("\n");
  const automatic = { triggerKind: 1 }, token = { isCancellationRequested: false };
  const above = "def add(alpha, beta):\n";
  const ask = async (line) => {
    const items = await app.completion.getCompletionItems(
      document("a.py", above + line + "\n"), new Position(1, line.length), automatic, token);
    return items.map((item) => item.insertText);
  };
  const shown = await ask("    ret");
  await settle(() => !bar.text.includes("thinking"));  // the status bar has read its figures
  const figures = bar.text;
  // What follows an accepted suggestion is asked for ahead, but kept only from an answer that is one object.
  if (shown.length === 1) await settle(() => app.lruResultCache.size() >= 2);
  const typed = await ask("    retu");  // typed into the suggestion: answered from the client's own cache
  app.extraContext.pickChunk(helper.split("\n"), false, true, document("helper.py", helper));
  vscode.window.activeTextEditor = { document: document("a.py", above) };
  app.extraContext.lastComplStartTime = 0;
  app.extraContext.periodicRingBufferUpdate();  // the ring warms the server up
  const other = await ask("    x = compute_to");
  await settle(() => !app.completion.isRequestInProgress);
  console.log(JSON.stringify({ shown, typed, other, figures, messages, chunks: app.extraContext.chunks.length }));
})();
