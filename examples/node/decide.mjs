// A decision from Node.js, in its own process:
//
//   npm install && node decide.mjs LIBRARY model.gguf "Which is a fruit? A) apple B) table." A B
//
// LIBRARY is PREFIX/lib/libbmoe.so.N of `make install`, or bmoe_native/libbmoe.so.N of a wheel. Prints one line per
// choice: its log-probability over the whole vocabulary, and the choice.

import { BmoeError, Library } from "./bmoe.mjs";

function main([library, model, question, ...choices]) {
  if (choices.length === 0) {
    console.error("usage: node decide.mjs LIBRARY MODEL.gguf QUESTION CHOICE...");
    return 2;
  }
  let engine;
  try {
    engine = new Library(library).open(model);
    engine.decide(question, choices).forEach((logp, i) => console.log(`${logp} ${choices[i]}`));
    return 0;
  } catch (error) {
    console.error(`decide: ${error.message}`);
    return error instanceof BmoeError ? 1 : 2;
  } finally {
    engine?.close();
  }
}

process.exitCode = main(process.argv.slice(2));
