// Types into VS Code in a browser as a person would: node vscode_window.cjs FOLDER URL FILE TEXT
// FOLDER has playwright-core in its node_modules. Prints what was shown at the cursor, as JSON, after Tab and saving.
const path = require("path");
const [folder, url, file, text] = process.argv.slice(2);
const { chromium } = require(path.join(folder, "node_modules", "playwright-core"));

async function main() {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"],
  });
  const page = await browser.newPage();
  await page.goto(url);
  await page.waitForSelector(".monaco-workbench");
  const welcome = page.locator(".monaco-dialog-modal-block"); // what the extension says once
  await welcome.waitFor({ timeout: 20000 }).catch(() => {});
  while (await welcome.count()) {
    await page.keyboard.press("Escape");
    await page.waitForTimeout(200);
  }
  await page.getByText(file).first().dblclick();
  await page.waitForSelector(".monaco-editor .view-line");
  await page.locator(".monaco-editor .view-line").first().click();
  await page.keyboard.press("Control+End");
  await page.keyboard.type(text, { delay: 40 });
  const ghost = page.locator('[class*="ghost-text"]').first();
  await ghost.waitFor();
  const shown = (await page.locator('[class*="ghost-text"]').allTextContents()).join("");
  await page.keyboard.press("Tab");
  await ghost.waitFor({ state: "detached" }).catch(() => {}); // or what follows is shown at once
  await page.keyboard.press("Escape");
  await page.keyboard.press("Control+S");
  await page.locator(".tab.dirty").waitFor({ state: "detached" });
  console.log(JSON.stringify(shown.replaceAll("\u00a0", " ")));
  await browser.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
