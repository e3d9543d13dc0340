// Returns the faults of a page's layout as sentences: text that is cut, that overlaps, that leaves the page.
(() => {
  const wrong = [];
  const name = (node) => `${node.tagName.toLowerCase()}${node.id ? `#${node.id}` : ""}.${node.getAttribute("class") ?? ""}`;
  const page = document.documentElement;
  if (page.scrollWidth > innerWidth + 1) wrong.push(`the page is ${page.scrollWidth} wide, the window ${innerWidth}`);

  // The visible part of a rectangle, after scrolling and clipping by its ancestors; null if there is none.
  function visible(node, rect) {
    let { left, top, right, bottom } = rect;
    for (let up = node; up && up !== document.body; up = up.parentElement) {
      const style = getComputedStyle(up);
      if (style.visibility === "hidden" || style.display === "none") return null;
      if (style.overflow !== "visible" && !(up instanceof SVGElement && up.tagName !== "svg")) {
        const box = up.getBoundingClientRect();
        left = Math.max(left, box.left); top = Math.max(top, box.top);
        right = Math.min(right, box.right); bottom = Math.min(bottom, box.bottom);
      }
    }
    return right - left > 1 && bottom - top > 1 ? { left, top, right, bottom } : null;
  }

  const texts = [];
  const dialog = document.querySelector("dialog[open]"); // text behind it is not checked
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, node = text.parentElement;
    if (!text.textContent.trim() || ["SCRIPT", "NOSCRIPT", "TITLE", "title", "OPTION"].includes(node.tagName)) continue;
    if (dialog && !dialog.contains(node)) continue;
    if (node.closest("noscript,dialog:not([open]),.hidden,.skip,option")) continue;
    if (node.closest("details:not([open])") && !node.closest("summary")) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const card = node.closest("#tiles > div,.card,.plot,dialog,header")?.getBoundingClientRect();
    for (const rect of range.getClientRects()) {
      if (card && !node.closest(".scroll") && (rect.right > card.right + 1 || rect.left < card.left - 1))
        wrong.push(`"${text.textContent.trim().slice(0, 40)}" leaves its box`);
      const box = visible(node, rect);
      if (box) texts.push({ node, box, words: text.textContent.trim().slice(0, 30) });
    }
    const inSvg = node.closest("svg");
    if (inSvg) {
      const own = node.getBoundingClientRect(), all = inSvg.getBoundingClientRect();
      if (own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 || own.bottom > all.bottom + 1)
        wrong.push(`"${text.textContent.trim()}" leaves its picture`);
    } else if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0 && getComputedStyle(node).overflowX === "hidden"
        && node.title !== text.textContent.trim()) wrong.push(`"${text.textContent.trim().slice(0, 40)}" is cut in ${name(node)} and has no title`);
  }
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  texts.sort((a, b) => a.box.top - b.box.top);
  for (let i = 0; i < texts.length; i += 1) {
    for (let j = i + 1; j < texts.length && texts[j].box.top < texts[i].box.bottom; j += 1) {
      if (texts[i].node !== texts[j].node && overlap(texts[i].box, texts[j].box))
        wrong.push(`"${texts[i].words}" in ${name(texts[i].node)} and "${texts[j].words}" in ${name(texts[j].node)} overlap`);
    }
  }
  return [...new Set(wrong)].slice(0, 20);
})()
