// Slipstream's gRPC API from Node: the model's id, then a streamed answer and its token counts.
//
//     npm install @grpc/grpc-js @grpc/proto-loader
//     node examples/node/chat.cjs [HOST:PORT]        default: 127.0.0.1:7000
//
// The messages are read from protos/ when the program starts, so no code is generated. SLIPSTREAM_API_KEY
// is sent where it is set; this connection is not encrypted.

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTOS = path.join(__dirname, "..", "..", "protos");
const definition = protoLoader.loadSync("slipstream/v1/router.proto", {
  includeDirs: [PROTOS],
  keepCase: true, // names as in the .proto files
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true, // `kind` names the field that is set
});
const { slipstream } = grpc.loadPackageDefinition(definition);

function metadata(session) {
  const made = new grpc.Metadata();
  if (process.env.SLIPSTREAM_API_KEY) made.set("authorization", `Bearer ${process.env.SLIPSTREAM_API_KEY}`);
  if (session) made.set("x-session-affinity", session);
  return made;
}

function models(client) {
  return new Promise((resolve, reject) => {
    client.ListModels({}, metadata(), { deadline: Date.now() + 10_000 }, (error, answer) =>
      error ? reject(error) : resolve(answer.models.map((model) => model.id)),
    );
  });
}

// Writes the pieces as they arrive; resolves to the message `Finished`.
async function chat(client, messages, session) {
  const request = {
    chat: { messages: messages.map(({ role, text }) => ({ role, content: [{ text }] })) },
    sampling: { temperature: 0, max_tokens: 60 },
  };
  const call = client.Generate(request, metadata(session), { deadline: Date.now() + 60_000 });
  let finished;
  for await (const { events } of call) {
    for (const event of events) {
      if (event.kind === "delta") process.stdout.write(event.delta.text);
      if (event.kind === "finished") finished = event.finished;
    }
  }
  return finished;
}

async function main() {
  const endpoint = process.argv[2] ?? "127.0.0.1:7000";
  const client = new slipstream.v1.RouterService(endpoint, grpc.credentials.createInsecure());
  try {
    console.log(`models: ${(await models(client)).join(", ")}`);
    const messages = [
      { role: "MESSAGE_ROLE_SYSTEM", text: "You answer the customers of Blue Harbor. The warranty lasts 12 months." },
      { role: "MESSAGE_ROLE_USER", text: "How long is the warranty?" },
    ];
    const { finish_reason, usage } = await chat(client, messages, "node-example");
    const reason = finish_reason.replace("FINISH_REASON_", "").toLowerCase();
    console.log(`\n${reason}, ${usage.prompt_tokens} prompt tokens, ${usage.cached_tokens} cached`);
  } finally {
    client.close();
  }
}

main().catch((error) => {
  console.error(`${grpc.status[error.code] ?? error.name}: ${error.details ?? error.message}`);
  process.exitCode = 1;
});
