// The radix select against ranks by comparison, on lists with many ties, and with what is kept at its ends.
`timescale 1ns / 1ps
module argtopk_tb #(parameter DIGIT = 8);
    reg clk = 0, rst = 1, start = 0, key_valid = 0, load_end = 0, emit = 0, over;
    reg [31:0] key = 0;
    reg [10:0] keep = 0;
    reg [31:0] list [0:1023];
    wire ready, out_valid, out_take, done;
    integer seed = 5, round, i, j, count, kept, rank, wrong = 0, place, taken = 0;
    argtopk #(.LN(10), .DIGIT(DIGIT)) select(.clk(clk), .rst(rst), .start(start), .ready(ready), .key_valid(key_valid), .key(key),
        .load_end(load_end), .keep(keep), .emit(emit), .out_valid(out_valid), .out_take(out_take), .done(done));
    always #5 clk = !clk;
    initial begin
        repeat (4) @(negedge clk);
        rst = 0;
        for (round = 0; round < 60; round = round + 1) begin
            count = round == 0 ? 0 : 1 + ($random(seed) & 255);
            kept = round % 5 == 0 ? count : round % 5 == 1 ? 0 : ($random(seed) & 1023) % (count + 1);
            for (i = 0; i < count; i = i + 1)
                case (round % 3)
                    0: list[i] = $random(seed) & 3;
                    1: list[i] = $random(seed);
                    default: list[i] = 32'hff000000 | ($random(seed) & 32'h7) << (8 * (round % 4));
                endcase
            keep = kept;
            start = 1;
            @(negedge clk);
            start = 0;
            while (!ready) @(negedge clk);
            for (i = 0; i < count; i = i + 1) begin
                key_valid = 1;
                key = list[i];
                @(negedge clk);
                key_valid = 0;
                if (($random(seed) & 3) == 0) @(negedge clk);
            end
            load_end = 1;
            @(negedge clk);
            load_end = 0;
            // Who takes may come when all is known, of no key, too.
            if (round % 3 == 0) repeat (2500) begin
                if (out_valid || done) wrong = wrong + 1;
                @(negedge clk);
            end
            emit = 1;
            place = 0;
            over = 0;
            while (!over) begin
                if (out_valid) begin
                    rank = 0;
                    for (j = 0; j < count; j = j + 1)
                        if (list[j] > list[place] || (list[j] == list[place] && j < place)) rank = rank + 1;
                    if (out_take !== (rank < kept)) wrong = wrong + 1;
                    taken = taken + out_take;
                    place = place + 1;
                end
                over = done;
                @(negedge clk);
            end
            emit = 0;
            if (place != count) wrong = wrong + 1;
        end
        $display("wrong %0d taken %0d", wrong, taken);
        $finish;
    end
endmodule
